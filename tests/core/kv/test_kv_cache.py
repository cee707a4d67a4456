"""Block tables over the pool: shared pages, hits in the prefix cache, and the pages left for other requests."""

from collections.abc import Sequence

import msgspec
import pytest

from quire.core.kv.kv_cache import KVCacheManager
from quire.core.scheduling.request import Request
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import ROW_DIGEST_BYTES, PromptEmbeds
from tests.core.scheduling.fake_worker import FULL, make_request, scheduled

SIZE = 4
CHUNK = 8


def manager(num_pages: int = 16, groups: Sequence[KVGroupSpec] = (FULL,), **options: bool) -> KVCacheManager:
    return KVCacheManager(groups, num_pages=num_pages, block_size=SIZE, largest_chunk=CHUNK, **options)


def request(prompt: list[int], request_id: str = "r", cache_salt: str | None = None) -> Request:
    wire = make_request(request_id, prompt, cache_salt=cache_salt)
    return scheduled(wire)


def admit(kv: KVCacheManager, req: Request) -> int:
    """Admits and computes the whole prompt; returns how many tokens came from the cache."""
    assert try_admit(kv, req)
    num_cached = req.num_planned_tokens
    compute(kv, req)
    return num_cached


def try_admit(kv: KVCacheManager, req: Request, num_tokens: int | None = None, num_running: int = 0) -> bool:
    return kv.admit(req, kv.find_prefix(req), num_tokens or req.num_tokens, num_running=num_running)


def pages_of(req: Request) -> list[list[int]]:
    """Per group, the pages that the request holds."""
    return [table.pages for table in req.block_tables]


def found(kv: KVCacheManager, prompt: list[int]) -> list[list[int]]:
    """Per group, the pages that a request with `prompt` would start with."""
    return [table.pages for table in kv.find_prefix(request(prompt)).tables]


def compute(kv: KVCacheManager, req: Request) -> None:
    req.num_planned_tokens = req.num_tokens
    kv.cache_full_blocks(req)


def sample(req: Request, token: int) -> None:
    req.output_token_ids.append(token)
    req.num_tokens += 1


def test_a_prefix_is_shared_while_its_first_owner_still_runs() -> None:
    kv = manager()
    first, second = request([1] * 10), request([1] * 8 + [2] * 3)
    assert admit(kv, first) == 0
    assert admit(kv, second) == 8
    assert pages_of(second)[0][:2] == pages_of(first)[0][:2]
    assert pages_of(second)[0][2] != pages_of(first)[0][2]
    assert kv.usage == 4 / 16
    kv.check_invariants([first, second])


@pytest.mark.parametrize(("num_prompt", "num_found"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_left_to_compute(num_prompt: int, num_found: int) -> None:
    kv = manager()
    admit(kv, request([1] * 20))
    assert len(found(kv, [1] * num_prompt)[0]) * SIZE == num_found


def test_embedded_prompts_are_told_apart_by_their_rows_and_not_by_their_ids() -> None:
    kv = manager()

    def embedded(rows: str, num_tokens: int = 9) -> Request:
        digests = b"".join(letter.encode() * ROW_DIGEST_BYTES for letter in rows)
        wire = msgspec.structs.replace(
            make_request("r", [0] * num_tokens), prompt_embeds=PromptEmbeds("float32", b"", digests)
        )
        return scheduled(wire)

    assert admit(kv, request([0] * 9)) == 0
    first = embedded("abcdefghi")
    assert admit(kv, first) == 0
    assert admit(kv, embedded("abcdefghi")) == 8
    assert admit(kv, embedded("abcdefgxi")) == 4
    assert admit(kv, embedded("xbcdefghi")) == 0
    assert admit(kv, request([0] * 9)) == 8
    for token in (5, 6, 7, 8):  # a block of a row and three ids, then one of ids alone
        sample(first, token)
    compute(kv, first)
    resumed = embedded("abcdefghi")
    resumed.output_token_ids += [5, 6, 7, 8]
    resumed.num_tokens += 4
    assert admit(kv, resumed) == 12
    other = embedded("abcdefghx")
    other.output_token_ids += [5, 6, 7, 8]
    other.num_tokens += 4
    assert admit(kv, other) == 8


def test_the_same_block_after_another_parent_is_not_found() -> None:
    kv = manager()
    admit(kv, request([1] * 4 + [2] * 4 + [3]))
    assert found(kv, [9] * 4 + [2] * 4 + [3]) == [[]]
    assert found(kv, [2] * 4 + [3]) == [[]]


def test_salts_separate_requests() -> None:
    kv = manager()
    admit(kv, request([1] * 9, cache_salt="a"))
    assert admit(kv, request([1] * 9, cache_salt="b")) == 0
    assert admit(kv, request([1] * 9)) == 0
    assert admit(kv, request([1] * 9, cache_salt="a")) == 8


def test_nothing_is_found_when_caching_is_off() -> None:
    kv = manager(enable_prefix_caching=False)
    admit(kv, request([1] * 9))
    assert admit(kv, request([1] * 9)) == 0
    assert kv.prefix_cache_counts == (0, 0)


def test_only_planned_blocks_are_announced() -> None:
    kv = manager()
    first = request([1] * 12)
    assert try_admit(kv, first)
    assert found(kv, [1] * 12) == [[]]
    first.num_planned_tokens = 7  # a chunk ends within the second block
    kv.cache_full_blocks(first)
    assert len(found(kv, [1] * 12)[0]) == 1


def test_a_block_with_a_placeholder_is_announced_once_its_token_is_known() -> None:
    kv = manager()
    req = request([1] * 7)
    admit(kv, req)
    req.num_tokens += 1  # being sampled
    req.num_planned_tokens = 8  # and already planned to be computed
    kv.cache_full_blocks(req)
    assert len(found(kv, [1] * 7 + [5, 6])[0]) == 1
    req.output_token_ids.append(5)
    kv.cache_full_blocks(req)
    assert len(found(kv, [1] * 7 + [5, 6])[0]) == 2


def test_outputs_are_findable_after_their_request_has_gone() -> None:
    kv = manager()
    req = request([1] * 6)
    admit(kv, req)
    for token in (7, 8, 9):
        sample(req, token)
    kv.grow(req, 9)
    req.num_planned_tokens = 8  # the last token is never computed
    kv.free(req)
    follow_up = request([1] * 6 + [7, 8, 9, 3])
    assert admit(kv, follow_up) == 8


def test_grow_adds_pages_only_while_there_are_some() -> None:
    kv = manager(num_pages=3)
    req = request([1] * 8)
    admit(kv, req)
    assert req.pages_settled_until == 8
    added = kv.grow(req, 9)
    assert added is not None
    assert pages_of(req)[0][2:] == added[0]
    assert req.pages_settled_until == 12
    assert kv.grow(req, 13) is None
    kv.check_invariants([req])


def test_admission_leaves_a_page_for_each_request_that_runs() -> None:
    kv = manager(num_pages=4)
    req = request([1] * 9)
    assert not try_admit(kv, req, num_running=2)
    assert (kv.usage, req.block_tables) == (0, [])
    assert try_admit(kv, req, num_running=1)


def test_admission_does_not_count_cached_pages_of_its_own_prefix_twice() -> None:
    kv = manager(num_pages=3)
    first = request([1] * 9)
    admit(kv, first)
    kv.free(first)
    again = request([1] * 8 + [2] * 5)  # two cached pages, two new ones, three in all
    assert not try_admit(kv, again)
    again = request([1] * 8 + [2] * 4)
    assert admit(kv, again) == 8
    kv.check_invariants([again])


def test_a_sequence_is_evicted_from_its_tail() -> None:
    kv = manager(num_pages=4)
    first = request([1] * 16)
    admit(kv, first)
    kv.free(first)
    other = request([2] * 5)
    admit(kv, other)
    assert len(found(kv, [1] * 17)[0]) == 2


def test_a_disowned_request_leaves_nothing_behind() -> None:
    kv = manager()
    first, second = request([1] * 9), request([1] * 9)
    admit(kv, first)
    admit(kv, second)
    kv.free(first)
    kv.disown(first)
    assert found(kv, [1] * 9) == [[]]
    kv.check_invariants([second])
    kv.free(second)
    kv.check_invariants([])


def test_each_group_has_a_table_and_a_hit_needs_all_of_them() -> None:
    kv = manager(groups=[FULL, FULL])
    assert kv.max_pages(9) == 6
    first = request([1] * 9)
    admit(kv, first)
    pages = pages_of(first)
    assert [len(table) for table in pages] == [3, 3]
    assert not set(pages[0]) & set(pages[1])
    assert found(kv, [1] * 9) == [table[:2] for table in pages]
    kv._pool.disown([(first.block_hashes[1], 1)])
    assert found(kv, [1] * 9) == [table[:1] for table in pages]
    added = kv.grow(first, 13)
    assert added is not None
    assert [len(pages) for pages in added] == [1, 1]
    kv.check_invariants([first])


def test_queries_and_hits_are_counted_at_first_admission_only() -> None:
    kv = manager()
    admit(kv, request([1] * 9))
    again = request([1] * 9)
    admit(kv, again)
    assert kv.prefix_cache_counts == (18, 8)
    kv.free(again)
    again.num_preemptions = 1
    admit(kv, again)
    assert kv.prefix_cache_counts == (18, 8)


def test_reset_forgets_what_nobody_uses() -> None:
    kv = manager()
    first = request([1] * 9)
    admit(kv, first)
    assert not kv.reset_prefix_cache()
    kv.free(first)
    assert kv.reset_prefix_cache()
    assert found(kv, [1] * 9) == [[]]
