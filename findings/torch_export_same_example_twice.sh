#!/usr/bin/env bash
# torch 2.13.0, torch.export.export (and torch.onnx.export, which is built on it).
#
# Guess: examples give shapes and dtypes alone, so one tensor of ones may be the example of two inputs, such as the
# tokens and the mask of an encoder.
#
# Behaviour: two inputs with the same tensor object as their example become one. The program still takes both, computes
# with the last for both, and neither warns nor checks. An encoder exported so reads its mask as its tokens, and its
# vectors look right: of the right shape and length, and almost the same for any text.
#
# Seen: [55, 66] for 10 * [1, 2] + [5, 6] with one example, [15, 26] with two equal ones.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
cat > "$folder/check.py" <<'PYTHON'
import torch


class Sum(torch.nn.Module):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return 10 * tokens + mask


def computed(*examples: torch.Tensor) -> list[int]:
    return torch.export.export(Sum(), examples).module()(torch.tensor([1, 2]), torch.tensor([5, 6])).tolist()


ones = torch.ones(2, dtype=torch.long)
print("one example", computed(ones, ones), "two equal ones", computed(ones, ones.clone()))
assert computed(ones, ones.clone()) == [15, 26]
assert computed(ones, ones) == [55, 66]
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
