"""Has the system hand out the KV cache's memory before requests need it. On a CPU that happens when memory is first
written; in a virtual machine it can take two seconds per gigabyte, for which neither a request nor the start waits."""

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
"""Bytes that are touched at once: a huge page."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_LAST = 19  # the nicest


def touch_behind(kv_caches: Sequence[torch.Tensor], block_size: int, max_seconds: float) -> threading.Thread:
    """Starts a thread that runs `touch`, at the lowest priority."""

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST)
        touch(kv_caches, block_size, max_seconds)

    thread = threading.Thread(target=run, name="first touch", daemon=True)
    thread.start()
    return thread


def touch(kv_caches: Sequence[torch.Tensor], block_size: int, max_seconds: float) -> None:
    """Has memory handed out for the first pages of every layer's cache [num_pages, ...], until the time is up.

    What is written there stays, so steps may run meanwhile. The remaining memory is handed out as it is used: all of
    it, if the system is older than Linux 5.14.
    """
    deadline = time.monotonic() + max_seconds
    libc = ctypes.CDLL(None)  # a call releases the interpreter's lock
    block_bytes = kv_caches[0][0].numel() * kv_caches[0].element_size()
    slice_blocks = max(1, _SLICE_BYTES // block_bytes)
    for start in range(0, min(-(-NUM_TOKENS // block_size), len(kv_caches[0])), slice_blocks):
        for cache in kv_caches:
            pages = cache[start : start + slice_blocks]
            first, size = pages.data_ptr(), pages.numel() * pages.element_size()
            aligned = first - first % mmap.PAGESIZE
            size += first - aligned
            if libc.madvise(ctypes.c_void_p(aligned), ctypes.c_size_t(size), _POPULATE_WRITE):
                return
            if time.monotonic() > deadline:
                return
