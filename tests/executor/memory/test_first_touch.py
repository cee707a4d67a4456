"""Memory of the KV cache is touched before it is needed."""

import mmap

import psutil
import torch

from quire.executor.memory.first_touch import NUM_TOKENS, touch, touch_behind

MIB = 2**20


def untouched_cache(num_pages: int) -> torch.Tensor:
    """Pages of 16 tokens of 4 KiB each, that the system has not handed out yet."""
    fresh = mmap.mmap(-1, num_pages * 64 * 1024, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(fresh, dtype=torch.uint8).view(num_pages, -1)


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
    cache = untouched_cache(64)
    before = resident_bytes()
    touch([cache], 16, max_seconds=60)
    assert resident_bytes() - before > 3 * MIB


def test_what_is_written_meanwhile_stays():
    cache = untouched_cache(4096)
    thread = touch_behind([cache], 16, max_seconds=60)
    cache[::7] = 3
    thread.join()
    assert bool((cache[::7] == 3).all())
    assert not cache[1:600:7].any()


def test_memory_that_begins_within_a_page_of_the_system_is_left_as_it_is():
    cache = torch.full((3, 8), 7.0)
    touch([cache], 16, max_seconds=60)
    assert bool((cache == 7).all())
