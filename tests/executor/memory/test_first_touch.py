"""Memory of the KV cache is touched before it is needed."""

import numpy as np
import psutil
import torch

from quire.executor.memory.first_touch import NUM_TOKENS, touch

MIB = 2**20


def untouched_cache(num_pages: int) -> torch.Tensor:
    """Pages of 16 tokens of 4 KiB each, that the system has not handed out yet."""
    return torch.from_numpy(np.zeros(num_pages * 64 * 1024, np.uint8)).view(num_pages, -1)


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def test_the_pages_that_are_used_first_are_resident_afterwards():
    cache = untouched_cache(4096)
    before = resident_bytes()
    touch([cache], 16, max_seconds=60)
    grown = resident_bytes() - before
    expected = NUM_TOKENS * 4096
    assert expected - 2 * MIB < grown < 2 * expected  # and not all 65536 tokens
    assert not cache[:600].any()


def test_it_ends_when_the_time_is_up():
    cache = untouched_cache(4096)
    before = resident_bytes()
    touch([cache], 16, max_seconds=0)
    assert resident_bytes() - before < 8 * MIB


def test_a_cache_smaller_than_that_is_touched_whole():
    cache = torch.full((3, 8), 7.0)
    touch([cache], 16, max_seconds=60)
    assert not cache.any()
