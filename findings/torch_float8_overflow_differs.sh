#!/usr/bin/env bash
# torch 2.13.0 on a CPU.
#
# Guess: the two 8-bit floats treat a value that is too large in one way, as float16 and bfloat16 do (infinity).
#
# Behaviour: float8_e4m3fn, which has no infinity, saturates at its largest value. float8_e5m2 becomes infinite, from
# half a step above its largest value on. A cache or a weight cast without a clamp is silently wrong in one format, and
# poisons a sum in the other.
#
# Seen: 500, 1e9 and infinity become 448 in float8_e4m3fn; 61000 becomes 57344 in float8_e5m2, 62000 becomes infinite.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
cat > "$folder/check.py" <<'PYTHON'
import math

import torch


def cast(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value).to(dtype).float().item()


seen = {
    dtype: [cast(value, dtype) for value in values]
    for dtype, values in {
        torch.float8_e4m3fn: (440.0, 500.0, 1e9, math.inf),
        torch.float8_e5m2: (57344.0, 61000.0, 62000.0, math.inf),
    }.items()
}
print(seen)
assert seen[torch.float8_e5m2] == [57344.0, 57344.0, math.inf, math.inf], seen
assert seen[torch.float8_e4m3fn] == [448.0, 448.0, 448.0, 448.0], seen
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
