"""The KV cache's first use. On a CPU the system hands out memory when it is first written, and in a virtual machine a
gigabyte of that can take two seconds: better before the first request than in the middle of it."""

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

NUM_TOKENS = 32768
"""Room that is made ready: low pages leave the pool first."""
_SLICE_BYTES = 2 << 20
"""What a thread clears at once. A huge page: two threads in one would both clear it."""


def touch(kv_caches: Sequence[torch.Tensor], block_size: int, max_seconds: float) -> None:
    """Writes zeros to the first pages of every layer's cache [num_pages, ...], dense, until the time is up.

    Then serving matters more; what is left is handed out as it is used.
    """
    deadline = time.monotonic() + max_seconds
    block_bytes = kv_caches[0][0].numel() * kv_caches[0].element_size()
    slice_blocks = max(1, _SLICE_BYTES // block_bytes)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for start in range(0, min(-(-NUM_TOKENS // block_size), len(kv_caches[0])), slice_blocks):
            list(pool.map(_clear, (cache[start : start + slice_blocks] for cache in kv_caches)))
            if time.monotonic() > deadline:
                return


def _clear(pages: torch.Tensor) -> None:
    # Not zero_(), which shares one slice among threads; this lets other threads run as well.
    ctypes.memset(pages.data_ptr(), 0, pages.numel() * pages.element_size())
