"""The KV cache's first use. On a CPU the system hands out memory when it is first written, and in a virtual machine a
gigabyte of that can take two seconds: better before the first request than in the middle of it."""

import time
from collections.abc import Sequence

import torch

NUM_TOKENS = 8192
"""Room that is made ready: low pages leave the pool first."""
MAX_SECONDS = 1.0
"""Then serving matters more; what is left is handed out as it is used."""
_SLICE_TOKENS = 256


def touch(kv_caches: Sequence[torch.Tensor], block_size: int, max_seconds: float = MAX_SECONDS) -> None:
    """Writes zeros to the first pages of every layer's cache [num_blocks, ...], until the time is up."""
    deadline = time.monotonic() + max_seconds
    slice_blocks = max(1, _SLICE_TOKENS // block_size)
    for start in range(0, -(-NUM_TOKENS // block_size), slice_blocks):
        for cache in kv_caches:
            cache[start : start + slice_blocks].zero_()
        if time.monotonic() > deadline:
            return
