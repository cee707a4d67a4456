"""Snapshots of recurrent states in the prefix cache: when they are taken, found, shortened and given up."""

from collections.abc import Sequence

import pytest

from quire.core.kv.block_hashes import BlockHasher
from quire.core.kv.kv_cache import KVCacheManager
from quire.core.scheduling.request import Request
from quire.core.wire.kv_groups import KVGroupSpec
from tests.core.scheduling.fake_worker import FULL, make_request, recurrent, scheduled, window

SIZE = 4


def manager(groups: Sequence[KVGroupSpec], *, num_pages: int = 64) -> KVCacheManager:
    return KVCacheManager(groups, num_pages=num_pages, block_size=SIZE, largest_chunk=8)


def request(prompt: list[int], name: str = "r") -> Request:
    return scheduled(make_request(name, prompt))


def prefill(kv: KVCacheManager, req: Request, chunk: int = 8) -> int:
    """Admits `req` and computes its prompt in chunks, as a scheduler does; returns how much was found."""
    prefix = kv.find_prefix(req)
    start = found = prefix.num_blocks * SIZE
    assert kv.admit(req, prefix, min(start + chunk, req.num_tokens), num_running=0)
    while start < req.num_tokens:
        end = min(start + chunk, req.num_tokens, kv.next_border(start))
        if end > req.pages_settled_until:
            assert kv.grow(req, end) is not None
        kv.take_snapshot(req, end)
        req.num_planned_tokens = start = end
        kv.cache_full_blocks(req)
        kv.check_invariants([req])
    return found


@pytest.mark.parametrize("groups", [[recurrent(2, 8)], [FULL, recurrent(2, 8)], [FULL, window(5), recurrent(2, 8)]])
def test_a_prefix_ends_where_there_is_a_whole_snapshot(groups: list[KVGroupSpec]) -> None:
    kv = manager(groups)
    req = request(list(range(38)))
    assert prefill(kv, req) == 0
    kv.free(req)
    kv.check_invariants([])
    hashes, group = req.block_hashes, len(groups) - 1
    for evicted, expected in (((0, 0), 32), ((7, group + 1), 24), ((5, group), 16), ((3, group), 8), ((1, group), 0)):
        kv._pool.disown([(hashes[evicted[0]], evicted[1])] if evicted != (0, 0) else [])
        prefix = kv.find_prefix(request(list(range(38))))
        assert prefix.num_blocks * SIZE == expected
        assert [table.end for table in prefix.tables] == [expected // SIZE] * group
        assert len(prefix.snapshot) == (2 if expected else 0)


def test_a_snapshot_after_blocks_whose_keys_are_gone_is_of_no_use() -> None:
    kv = manager([FULL, recurrent(1, 8)])
    req = request(list(range(38)))
    prefill(kv, req)
    kv.free(req)
    kv._pool.disown([(req.block_hashes[5], 0)])
    assert kv.find_prefix(request(list(range(38)))).num_blocks == 4


def test_a_snapshot_is_findable_from_the_next_plan_on() -> None:
    kv = manager([FULL, recurrent(1, 8)])
    req = request(list(range(20)))
    assert kv.admit(req, kv.find_prefix(req), 8, num_running=0)
    assert kv.take_snapshot(req, 8) is not None
    req.num_planned_tokens = 8
    kv.cache_full_blocks(req)
    other = request(list(range(20)), "s")
    assert kv.find_prefix(other).num_blocks == 0, "the step that computes it has not run when this plan's rows begin"
    assert kv.is_underway(other, kv.find_prefix(other), [req])
    assert req.pages_settled_until <= 8, "or nobody would announce it"
    assert kv.grow(req, 16) is not None
    assert kv.find_prefix(other).num_blocks == 2


def test_a_snapshot_holds_no_page_that_somebody_needs() -> None:
    kv = manager([FULL, recurrent(2, 4)], num_pages=5)
    req = request([1, 2, 3, 4])
    assert kv.admit(req, kv.find_prefix(req), 4, num_running=0)
    snapshot = kv.take_snapshot(req, 4)
    assert snapshot is not None
    assert kv.usage == 1 / 5
    assert kv.has_pages(snapshot)
    other = request([9] * 12, "s")
    assert kv.admit(other, kv.find_prefix(other), 12, num_running=1)
    assert not kv.has_pages(snapshot)
    assert kv.take_snapshot(other, 12) is None, "one page is left"
    other.num_planned_tokens = 12
    kv.free(req)
    assert kv.find_prefix(request([1, 2, 3, 4, 5])).num_blocks == 0
    kv.check_invariants([other])


def test_a_snapshot_of_unknown_tokens_waits_for_them() -> None:
    kv = manager([FULL, recurrent(1, 4)])
    req = request([1, 2, 3])
    prefill(kv, req)
    req.num_tokens += 1  # the token at position 3 is being sampled, and is planned to be computed
    assert kv.grow(req, 4) is not None
    assert kv.take_snapshot(req, 4) is not None
    req.num_planned_tokens = 4
    assert kv.grow(req, 5) is not None
    assert kv.find_prefix(request([1, 2, 3, 4, 5])).num_blocks == 0
    req.output_token_ids.append(4)
    assert kv.grow(req, 5) is not None
    assert kv.find_prefix(request([1, 2, 3, 4, 5])).num_blocks == 1


def test_a_snapshot_that_is_there_is_not_taken_again_and_remains_of_one_are_not_mixed_with_another() -> None:
    kv = manager([FULL, recurrent(3, 4)])
    first, second = request([1, 2, 3, 4, 5]), request([1, 2, 3, 4, 5], "s")
    prefill(kv, first)
    kv.free(first)
    second.sampling.skip_reading_prefix_cache = True
    assert kv.admit(second, kv.find_prefix(second), 4, num_running=0)
    BlockHasher(SIZE).extend(second, 1)
    assert kv.take_snapshot(second, 4) is None
    kv._pool.disown([(first.block_hashes[0], 2)])
    taken = kv.take_snapshot(second, 4)
    assert taken is not None
    second.num_planned_tokens = 4
    kv.free(second)
    assert kv.find_prefix(request([1, 2, 3, 4, 5])).snapshot == taken.pages
    kv.check_invariants([])


def test_snapshots_end_with_blocks() -> None:
    with pytest.raises(ValueError, match="every 6 tokens"):
        manager([recurrent(1, 6)])


def test_disowned_requests_leave_no_snapshot() -> None:
    kv = manager([FULL, recurrent(2, 8)])
    req = request(list(range(38)))
    prefill(kv, req)
    kv.free(req)
    kv.disown(req)
    assert kv.find_prefix(request(list(range(38)))).num_blocks == 0
    assert kv.reset_prefix_cache()
    assert not kv._pool._pages
