#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0, JambaForCausalLM.
#
# Guess: a LoRA adapter of a linear layer changes outputs as much beside the weights as merged into them.
#
# Behaviour: an adapter of dt_proj does nothing until it is merged: the library's Mamba layer multiplies by dt_proj.weight itself,
# so PEFT's layer is not called. Its neighbour in_proj behaves as expected. Training such an adapter changes nothing, either.
#
# Seen: dt_proj: unmerged - base 0.000, merged - base 4.400.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.24.0 torch==2.13.0
cat > "$folder/check.py" <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import JambaConfig, JambaForCausalLM

torch.manual_seed(0)
config = JambaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    num_experts=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8, use_mamba_kernels=False, initializer_range=0.3,
)
model = JambaForCausalLM(config).eval()
ids = torch.arange(12)[None]
with torch.inference_mode():
    base = model(ids).logits
for name in ("in_proj", "dt_proj"):
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=[name], init_lora_weights=False)).eval()
    with torch.inference_mode():
        beside = adapted(ids).logits
    adapted.merge_adapter()
    with torch.inference_mode():
        merged = adapted(ids).logits
    adapted.unmerge_adapter()
    model = adapted.unload()
    print(f"{name}: unmerged - base {(beside - base).abs().max():.3f}, merged - base {(merged - base).abs().max():.3f}")
    assert bool((beside - base).abs().max() > 1e-3) == (name == "in_proj")
    assert (merged - base).abs().max() > 1e-3
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
