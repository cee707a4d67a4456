#!/usr/bin/env bash
# transformers 5.24.0, NllbMoeForConditionalGeneration.
#
# Guess: a token goes through the two experts that its router chooses.
#
# Behaviour: every token goes through the experts 0 and 1, whatever the router says. The experts are called with the
# router's one-hot mask, [tokens, experts] of zeros and ones, where they expect the numbers of experts: the zeros are taken
# for expert 0 and the ones for expert 1. The other experts' weights have no effect on any text.
#
# Seen: with the weights of experts 2 and 3 drawn anew, the logits differ by 0.0; with those of experts 0 and 1, by 6.9.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
cat > "$folder/check.py" <<'PYTHON'
import torch
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

torch.manual_seed(0)
config = NllbMoeConfig(
    vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=32, decoder_ffn_dim=32, num_experts=4, expert_capacity=64, encoder_sparse_step=1, decoder_sparse_step=1,
    moe_token_dropout=0.0, init_std=0.5, max_position_embeddings=64,
)
model = NllbMoeForConditionalGeneration(config).eval()
source, target = torch.arange(5, 45)[None], torch.arange(2, 12)[None]


@torch.inference_mode()
def logits() -> torch.Tensor:
    return model(input_ids=source, decoder_input_ids=target).logits


def redraw(*experts: int) -> None:
    for name, weight in model.named_parameters():
        if any(f"expert_{each}." in name for each in experts):
            torch.nn.init.normal_(weight, std=0.5)


before = logits()
redraw(2, 3)
others = (logits() - before).abs().max().item()
redraw(0, 1)
first = (logits() - before).abs().max().item()
print(f"experts 2 and 3: {others:.4f}; experts 0 and 1: {first:.4f}")
assert others == 0.0, others
assert first > 1e-2, first
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
