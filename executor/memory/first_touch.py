"""Writes to the KV cache's memory before the first request. On a CPU the system hands out memory when it is first
written; in a virtual machine that can take two seconds per gigabyte, which a request should not wait for."""

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

NUM_TOKENS = 32768
"""The most memory that is written: low pages leave the pool first."""
_SLICE_BYTES = 2 << 20
"""Bytes that a thread clears at once: a huge page, because two threads in one huge page would both clear it."""


def touch(kv_caches: Sequence[torch.Tensor], block_size: int, max_seconds: float) -> None:
    """Writes zeros to the first pages of every layer's cache [num_pages, ...], dense, until the time is up.

    The system hands out the remaining memory as it is used.
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
    # Not zero_(), which splits one slice among threads. memset releases the interpreter's lock, too.
    ctypes.memset(pages.data_ptr(), 0, pages.numel() * pages.element_size())
