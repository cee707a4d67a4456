#!/usr/bin/env bash
# transformers 5.24.0, ProphetNetForConditionalGeneration.
#
# Guess: the logits behind a target text are the same whether its tokens are read at once or one by one with a cache.
#
# Behaviour: they differ as soon as there are two tokens. Read at once, the rows of the relative positions are ordered by
# token, stream and head, and the indices into them by stream, head and token; the two agree for one token alone.
# `generate` reads one token at a time, so its texts are other ones than the losses and scores of whole targets suggest.
#
# Seen: one token 0.0; two tokens 2.2588, three tokens 1.0254.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
cat > "$folder/check.py" <<'PYTHON'
import torch
from transformers import ProphetNetConfig, ProphetNetForConditionalGeneration

torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2}
sizes |= {"num_decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.5}
model = ProphetNetForConditionalGeneration(ProphetNetConfig(vocab_size=40, **sizes)).eval()
source, target = torch.tensor([[5, 6, 7, 2]]), torch.tensor([[2, 5, 9]])


@torch.inference_mode()
def difference(length: int) -> float:
    at_once = model(input_ids=source, decoder_input_ids=target[:, :length], use_cache=False).logits[0, -1]
    cache = None
    for token in target[:, :length].split(1, dim=1):
        step = model(input_ids=source, decoder_input_ids=token, cache=cache, use_cache=True)
        cache = step.past_key_values
    return (at_once - step.logits[0, -1]).abs().max().item()


seen = [difference(length) for length in (1, 2, 3)]
print("one, two and three tokens:", [round(value, 4) for value in seen])
assert seen[0] < 1e-5, seen
assert seen[1] > 1e-2 and seen[2] > 1e-2, seen
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
