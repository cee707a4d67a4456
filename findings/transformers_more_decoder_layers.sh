#!/usr/bin/env bash
# transformers 5.24.0, T5, mT5 and UMT5.
#
# Guess: the two halves may have different numbers of layers, in either direction: the config has num_layers and
# num_decoder_layers.
#
# Behaviour: a forward pass without a cache takes both. `generate` sizes its cache by the encoder's layers, so a decoder
# with more layers than the encoder raises an IndexError, and one with fewer works.
#
# Seen: IndexError with 2 layers and 3; five tokens with 3 layers and 2.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
cat > "$folder/check.py" <<'PYTHON'
import torch
from transformers import AutoConfig, MT5ForConditionalGeneration, T5ForConditionalGeneration, UMT5ForConditionalGeneration

CLASSES = {"t5": T5ForConditionalGeneration, "mt5": MT5ForConditionalGeneration, "umt5": UMT5ForConditionalGeneration}


def model_of(kind: str, encoder: int, decoder: int) -> torch.nn.Module:
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "decoder_start_token_id": 0}
    return CLASSES[kind](AutoConfig.for_model(kind, num_layers=encoder, num_decoder_layers=decoder, **sizes))


def generated(model: torch.nn.Module) -> str:
    source = torch.tensor([[5, 6, 7, 2]])
    with torch.inference_mode():
        model(input_ids=source, decoder_input_ids=torch.tensor([[2, 8]]), use_cache=False)
    try:
        tokens = model.eval().generate(source, max_new_tokens=5, min_new_tokens=5, do_sample=False, num_beams=1)
    except IndexError:
        return "IndexError"
    return f"{tokens.shape[1] - 1} tokens"


seen = {kind: (generated(model_of(kind, 2, 3)), generated(model_of(kind, 3, 2))) for kind in CLASSES}
print(seen)
assert set(seen.values()) == {("IndexError", "5 tokens")}, seen
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
