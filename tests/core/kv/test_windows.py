"""Requests with window groups: the pages that they hold, give back, and find in the prefix cache."""

from collections.abc import Sequence

import pytest

from quire.core.kv.kv_cache import KVCacheManager
from quire.core.scheduling.request import Request
from quire.core.wire.kv_groups import KVGroupSpec
from tests.core.scheduling.fake_worker import FULL, Harness, make_request, scheduled, window

SIZE = 4


def manager(groups: Sequence[KVGroupSpec], *, num_pages: int = 64, chunk: int = 8) -> KVCacheManager:
    return KVCacheManager(groups, num_pages=num_pages, block_size=SIZE, largest_chunk=chunk)


def request(prompt: list[int], request_id: str = "r") -> Request:
    wire = make_request(request_id, prompt)
    return scheduled(wire)


def prefill(kv: KVCacheManager, req: Request, chunk: int = 8) -> int:
    """Admits `req` and computes its prompt in chunks; returns how many tokens came from the prefix cache."""
    prefix = kv.find_prefix(req)
    start = num_cached = prefix.num_blocks * SIZE
    assert kv.admit(req, prefix, min(start + chunk, req.num_tokens), num_running=0)
    while start < req.num_tokens:
        end = min(start + chunk, req.num_tokens)
        assert kv.grow(req, end) is not None
        req.num_planned_tokens = start = end
        kv.cache_full_blocks(req)
    return num_cached


def spans(req: Request) -> list[tuple[int, int]]:
    """Per group, the blocks that have a page."""
    return [(table.first, table.end) for table in req.block_tables]


def test_a_window_group_holds_what_the_next_chunk_sees_and_no_more() -> None:
    kv = manager([FULL, window(6)])
    req = request(list(range(32)))
    assert kv.admit(req, kv.find_prefix(req), 8, num_running=0)
    assert spans(req) == [(0, 8), (0, 2)]
    for start, blocks in ((8, (0, 4)), (16, (2, 6)), (24, (4, 8))):  # the chunk's first token sees from start - 5 on
        req.num_planned_tokens = start
        added = kv.grow(req, start + 8)
        assert added is not None
        assert [len(pages) for pages in added] == [0, 2]
        assert spans(req) == [(0, 8), blocks]
    assert kv.usage == 12 / 64


def test_decoding_holds_as_many_pages_as_a_window_may_touch() -> None:
    kv = manager([window(6)], chunk=1)
    req = request(list(range(8)))
    prefill(kv, req)
    most = 0
    for token in range(100):
        req.output_token_ids.append(token)
        req.num_tokens += 1
        if req.num_tokens > req.pages_settled_until:
            assert kv.grow(req, req.num_tokens) is not None
        req.num_planned_tokens += 1
        most = max(most, len(req.block_tables[0].pages))
        kv.check_invariants([req])
    assert most == kv.max_pages(1000) == 3


def test_pages_that_were_given_back_are_found_until_somebody_else_needs_them() -> None:
    kv = manager([window(6)], num_pages=12)
    req = request(list(range(40)))
    prefill(kv, req)
    assert kv.usage == 4 / 12
    assert [len(table.pages) for table in kv.find_prefix(request(list(range(21)))).tables] == [2]
    kv.free(req)
    prefill(kv, request([99] * 40))
    assert [table.pages for table in kv.find_prefix(request(list(range(21)))).tables] == [[]]


def test_a_hit_takes_only_the_pages_that_the_next_token_sees() -> None:
    kv = manager([FULL, window(6), window(1)])
    prompt = list(range(50))
    first, second = request([*prompt, 1]), request([*prompt, 2], "s")
    assert prefill(kv, first) == 0
    assert prefill(kv, second) == 48
    assert second.block_tables[0].pages[:12] == first.block_tables[0].pages[:12]
    kv.check_invariants([first, second])
    found = kv.find_prefix(request([*prompt, 3])).tables
    assert [(table.first, table.end) for table in found] == [(0, 12), (10, 12), (12, 12)]
    assert [table.on_wire()[:10] for table in found[1:]] == [[0] * 10] * 2


def test_a_hit_is_shorter_after_a_window_page_was_evicted() -> None:
    kv = manager([FULL, window(6)])
    req = request(list(range(50)))
    prefill(kv, req)
    kv.free(req)
    for evicted, longest in ((11, 11), (10, 10), (3, 10), (8, 8)):  # block 8 takes 9 and 10 along: they need it
        kv._pool.disown([(req.block_hashes[evicted], 1)])
        found = kv.find_prefix(request(list(range(50)))).tables
        assert [(table.first, table.end) for table in found] == [(0, longest), (longest - 2, longest)]
    kv._pool.disown([(req.block_hashes[5], 0)])  # of the full group
    found = kv.find_prefix(request(list(range(50)))).tables
    assert [table.end for table in found] == [3, 3]  # blocks 4 and 5 would need block 3 of the window, which is gone


def test_a_hit_suits_every_window_also_after_another_has_shortened_it() -> None:
    kv = manager([window(6), window(11)])
    req = request(list(range(50)))
    prefill(kv, req)
    kv.free(req)
    # The wide window could go on after 12 blocks, but not after the 11 that are left for the narrow one.
    for group, evicted in ((0, 11), (1, 8)):
        kv._pool.disown([(req.block_hashes[evicted], group)])
    found = kv.find_prefix(request(list(range(50)))).tables
    assert [(table.first, table.end) for table in found] == [(6, 8), (5, 8)]


def test_a_page_given_back_before_its_tokens_were_known_is_nobodys() -> None:
    kv = manager([FULL, window(1)], chunk=1)
    req = request([1] * 7)
    prefill(kv, req)
    for _ in range(2):  # the tokens at positions 7 and 8 are being sampled, and are planned to be computed
        req.num_tokens += 1
        assert kv.grow(req, req.num_tokens) is not None
        req.num_planned_tokens += 1
    assert spans(req) == [(0, 3), (2, 3)]
    req.output_token_ids += [5, 6]
    kv.cache_full_blocks(req)
    assert [kv._pool.find((digest, 0)) for digest in req.block_hashes] == req.block_tables[0].pages[:2]
    assert kv._pool.find((req.block_hashes[1], 1)) is None
    kv.free(req)
    assert [table.end for table in kv.find_prefix(request([1] * 7 + [5, 6])).tables] == [2, 2]
    kv.check_invariants([])


def test_disowned_requests_leave_nothing_in_any_group_not_even_what_they_gave_back() -> None:
    kv = manager([FULL, window(6)])
    req = request(list(range(50)))
    prefill(kv, req)
    kv.free(req)
    kv.disown(req)
    assert {kv._pool.find((digest, group)) for digest in req.block_hashes for group in (0, 1)} == {None}
    kv.check_invariants([])


def test_admission_wants_room_for_the_worst_chunk_of_a_window() -> None:
    """32 tokens in chunks of 8 with a window of 6: 8 pages, and 4 for the 13 tokens that a chunk sees or writes."""
    for num_pages, fits in ((11, False), (12, True)):
        kv = manager([FULL, window(6)], num_pages=num_pages)
        req = request(list(range(32)))
        assert kv.admit(req, kv.find_prefix(req), 8, num_running=0) == fits


def test_a_long_request_of_a_model_with_five_windows_to_one_full_group_holds_a_quarter_of_the_pages() -> None:
    """Of those that six full groups would hold, which take the pages of a whole prompt at once, at any moment."""
    length, chunk = 32_768, 2048
    groups = [FULL, *[window(1024)] * 5]
    harness = Harness(
        kv_groups=groups, num_pages=6 * length // 16, max_model_len=length, block_size=16,
        max_num_batched_tokens=chunk, check=False,
    )  # fmt: skip
    harness.add("long", length - 20, max_tokens=20)
    shares = []
    while harness.scheduler.has_unfinished():
        harness.step()
        shares.append(harness.scheduler.stats().kv_cache_usage)  # of the pages of six full groups
    assert len(shares) == 16 + 19
    assert 1 / 6 < max(shares) <= 1 / 4
    assert max(shares[16:-1]) < 0.2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shared_prefix_is_found_in_all_groups_by_a_request_that_comes_later(depth: int) -> None:
    harness = Harness(kv_groups=[window(6), FULL, window(11)], num_pages=100, depth=depth, max_num_batched_tokens=16)
    prompt = list(range(100, 150))
    for request_id, expected in (("first", 0), ("second", 48)):
        harness.add(request_id, prompt, max_tokens=20)
        harness.run()
        last = harness.streams[request_id].last
        assert last is not None
        assert last.num_cached_tokens == expected
    assert harness.streams["first"].token_ids == harness.streams["second"].token_ids
