#!/usr/bin/env bash
# transformers 5.24.0, FSMTForConditionalGeneration.
#
# Guess: as in every other decoder of the library, a decoder token's logits do not depend on the tokens after it.
#
# Behaviour: they do unless `use_cache=False` is given. The mask is made by a helper that is skipped when a cache is in
# use, which is the default, so logits of a whole target text are not those that `generate` computes token by token. A
# score of a translation, or a test of another implementation, has to ask without a cache.
#
# Seen: the first token's logits move by more than 0.001 with a second token behind it; not at all with use_cache=False.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
cat > "$folder/check.py" <<'PYTHON'
import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration

torch.manual_seed(0)
sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.5}
model = FSMTForConditionalGeneration(FSMTConfig(langs=["a", "b"], src_vocab_size=40, tgt_vocab_size=40, **sizes)).eval()
source = torch.tensor([[5, 6, 7, 2]])


def first_logits(*target: int, **options: bool) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=source, decoder_input_ids=torch.tensor([target]), **options).logits[0, 0]


moved = (first_logits(2, 9) - first_logits(2)).abs().max().item()
without_cache = (first_logits(2, 9, use_cache=False) - first_logits(2, use_cache=False)).abs().max().item()
print(f"by default {moved:.4f}, without a cache {without_cache:.7f}")
assert moved > 1e-3, moved
assert without_cache < 1e-5, without_cache
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
