"""Touches the KV cache's memory before requests need it. On a CPU the system allocates memory when it is first written;
in a virtual machine that can take two seconds per gigabyte. Neither a request nor the start waits for it.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Sequence

import torch

NUM_TOKENS = 32768
"""The most memory that is touched: low pages leave the pool first."""
_SLICE_BYTES = 2 << 20
"""The bytes that are touched at once: a huge page."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_LAST = 19  # the nicest


def touch_behind(kv_caches: Sequence[torch.Tensor], block_size: int, max_seconds: float) -> threading.Thread:
    """Starts a thread that runs `touch`, at the lowest priority.

    The thread does not call torch: a process that ends while a thread is inside torch aborts.
    """
    places, num_pages = _places(kv_caches), len(kv_caches[0])

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST)
        _touch(places, num_pages, block_size, max_seconds)

    thread = threading.Thread(target=run, name="first touch", daemon=True)
    thread.start()
    return thread


def touch(kv_caches: Sequence[torch.Tensor], block_size: int, max_seconds: float) -> None:
    """Touches the first pages of every layer's cache [num_pages, ...], until the time is up.

    Contents stay, so steps may run meanwhile. Other memory is allocated as it is used: all of it, if the system is
    older than Linux 5.14.
    """
    _touch(_places(kv_caches), len(kv_caches[0]), block_size, max_seconds)


def _places(kv_caches: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Returns each layer's first address, its stride between pages, and the bytes of a page."""
    sizes = [(cache.element_size(), cache[0].numel()) for cache in kv_caches]
    return [
        (cache.data_ptr(), cache.stride(0) * size, count * size)
        for cache, (size, count) in zip(kv_caches, sizes, strict=True)
    ]


def _touch(places: Sequence[tuple[int, int, int]], num_pages: int, block_size: int, max_seconds: float) -> None:
    deadline = time.monotonic() + max_seconds
    libc = ctypes.CDLL(None)  # a call releases the interpreter's lock
    slice_blocks = max(1, _SLICE_BYTES // places[0][2])
    end = min(-(-NUM_TOKENS // block_size), num_pages)
    for start in range(0, end, slice_blocks):
        for address, step, page_bytes in places:
            first, size = address + start * step, min(slice_blocks, num_pages - start) * page_bytes
            aligned = first - first % mmap.PAGESIZE
            size += first - aligned
            if libc.madvise(ctypes.c_void_p(aligned), ctypes.c_size_t(size), _POPULATE_WRITE):
                return
            if time.monotonic() > deadline:
                return
