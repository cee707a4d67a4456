"""Where kernels are tested: on an accelerator, or else in Triton's interpreter, which `tests/conftest.py` chooses."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    from tests.ops.triton import bfloat16

    bfloat16.make_exact()
