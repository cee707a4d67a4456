#!/usr/bin/env bash
# transformers 5.24.0, PaliGemma and Gemma 3.
#
# Guess: `token_type_ids` mean the same for both: tokens of type 1 are an image's and see each other, as Gemma 3's processor
# writes them.
#
# Behaviour: the meaning is turned round. In Gemma 3 tokens of type 1 see each other, and without the argument all are causal.
# In PaliGemma tokens of type 0 see each other, image and text of a prompt alike; type 1 is the answer, which is causal; and
# without the argument all see each other. A loop that feeds both by one convention gets an answer from each and no error.
#
# Seen, whether the first token's logits depend on the last token, for none, zeros and ones: PaliGemma yes, yes, no; Gemma 3
# no, no, yes.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0 pillow==12.0.0
cat > "$folder/check.py" <<'PYTHON'
import torch
from transformers import (
    Gemma3Config, Gemma3ForConditionalGeneration, PaliGemmaConfig, PaliGemmaForConditionalGeneration,
)

text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
text |= {"num_key_value_heads": 1, "vocab_size": 64, "initializer_range": 0.5}
vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
vision |= {"image_size": 56, "projection_dim": 16}
ids = torch.arange(5, 17)[None]


def sees_later(model: torch.nn.Module) -> list[bool]:
    other = ids.clone()
    other[0, -1] += 1
    seen = []
    for kind in (None, torch.zeros_like(ids), torch.ones_like(ids)):
        with torch.inference_mode():
            first, second = (model(input_ids=each, token_type_ids=kind).logits[0, 0] for each in (ids, other))
        seen.append((first - second).abs().max().item() > 1e-3)
    return seen


torch.manual_seed(0)
pali = PaliGemmaConfig(text_config=text | {"model_type": "gemma"}, vision_config=vision | {"model_type": "siglip_vision_model"})
gemma = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
first = sees_later(PaliGemmaForConditionalGeneration(pali).eval())
second = sees_later(Gemma3ForConditionalGeneration(gemma).eval())
print("none, zeros, ones: PaliGemma", first, "Gemma 3", second)
assert first == [True, True, False], first
assert second == [False, False, True], second
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
