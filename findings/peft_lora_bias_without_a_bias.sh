#!/usr/bin/env bash
# peft 0.21.2, `LoraConfig(lora_bias=True)` on linear layers without a bias, as most decoders have them.
#
# Guess: such an adapter can be merged, since the bias of B, scaled, would be the bias of the merged layer.
#
# Behaviour: `merge_and_unload` raises, as no bias is added to a layer that has none, so the adapter can only be served
# beside its base. Saving it warns that the bias of B has an invalid shape and comes from shards that were not gathered.
# The file is whole: loaded again, it computes the same.
#
# Seen: RuntimeError "Impossible to merge LoRA with `lora_bias=True`"; a warning "1 LoRA tensor(s) have invalid shape"
# from save_pretrained; a difference of 0.0 after loading.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.24.0 torch==2.13.0
cat > "$folder/check.py" <<'PYTHON'
import copy
import sys
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
base = Qwen3ForCausalLM(Qwen3Config(vocab_size=40, intermediate_size=32, **sizes))
config = LoraConfig(target_modules=["o_proj"], lora_bias=True, init_lora_weights=False)
adapted = get_peft_model(copy.deepcopy(base), config).eval()

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    adapted.save_pretrained(sys.argv[1])
shapes = [str(one.message) for one in caught if "invalid shape" in str(one.message)]
loaded = PeftModel.from_pretrained(base, sys.argv[1]).eval()
prompt = torch.tensor([[5, 6, 7]])
with torch.inference_mode():
    moved = (loaded(prompt).logits - adapted(prompt).logits).abs().max().item()
try:
    adapted.merge_and_unload()
    merged = "merged"
except RuntimeError as error:
    merged = str(error)
print(merged, shapes, moved, sep="\n")
assert "Impossible to merge" in merged, merged
assert len(shapes) == 1 and "lora_B.bias" in shapes[0], shapes
assert moved < 1e-6, moved
PYTHON
"$folder/venv/bin/python" "$folder/check.py" "$folder/adapter" 2> /dev/null
