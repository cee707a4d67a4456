#!/usr/bin/env bash
# transformers 5.24.0, BigBirdPegasusForConditionalGeneration.
#
# Guess: an input's result does not depend on the inputs before it.
#
# Behaviour: a short input, of at most (5 + 2 * num_random_blocks) * block_size tokens, is read with full attention, and
# the model stays so for the rest of its life. A long input gives other logits after a short one than before it. A server
# or a benchmark that mixes lengths therefore measures full attention after its first short text.
# `model.get_encoder().set_attention_type("block_sparse")` before each call goes back.
#
# Seen: 90 tokens twice: 0.0; again after 10 tokens: 4.6; after set_attention_type: 0.0.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
cat > "$folder/check.py" <<'PYTHON'
import torch
from transformers import BigBirdPegasusConfig, BigBirdPegasusForConditionalGeneration

torch.manual_seed(0)
config = BigBirdPegasusConfig(
    vocab_size=60, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=32, decoder_ffn_dim=32, block_size=4, num_random_blocks=2, init_std=0.5, max_position_embeddings=128,
)
model = BigBirdPegasusForConditionalGeneration(config).eval()
long, short = torch.randint(3, 60, (1, 90)), torch.randint(3, 60, (1, 10))


@torch.inference_mode()
def read(source: torch.Tensor) -> torch.Tensor:
    return model(input_ids=source, decoder_input_ids=torch.tensor([[2, 5, 9]])).logits


first = read(long)
again = (read(long) - first).abs().max().item()
read(short)
after = (read(long) - first).abs().max().item()
model.get_encoder().set_attention_type("block_sparse")
restored = (read(long) - first).abs().max().item()
print(f"again {again:.4f}, after a short input {after:.4f}, restored {restored:.4f}")
assert again == 0.0 and restored == 0.0, (again, restored)
assert after > 1e-2, after
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
