"""The pages that each kind of KV group needs, against the definition of the positions that a token sees."""

import pytest

from quire.core.kv.block_table import BlockTable
from quire.core.kv.groups import KVGroup, make_groups
from tests.core.scheduling.fake_worker import FULL, window

NUM_BLOCKS = 12
WINDOWS = [None, 1, 2, 3, 4, 5, 9, 30, 1000]


def make_group(num_tokens: int | None, block_size: int) -> KVGroup:
    spec = FULL if num_tokens is None else window(num_tokens)
    return make_groups([spec], block_size=block_size, largest_chunk=8)[0]


def seen_blocks(num_tokens: int | None, block_size: int, position: int) -> set[int]:
    """Blocks of the positions before `position` that the token at `position` sees."""
    first = 0 if num_tokens is None else max(0, position - num_tokens + 1)
    return {seen // block_size for seen in range(first, position)}


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("num_tokens", WINDOWS)
def test_a_block_is_needed_while_any_later_token_sees_it(num_tokens: int | None, block_size: int) -> None:
    group = make_group(num_tokens, block_size)
    for position in range(NUM_BLOCKS * block_size):
        seen = seen_blocks(num_tokens, block_size, position) | {position // block_size}
        assert group.first_needed_block(position) == min(seen)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("num_tokens", WINDOWS)
def test_tables_are_looked_at_again_exactly_when_they_must_change(num_tokens: int | None, block_size: int) -> None:
    """A request that computes token after token, and changes its table only when it is no longer settled."""
    group = make_group(num_tokens, block_size)
    table, settled_until = BlockTable(group), 0
    for position in range(NUM_BLOCKS * block_size):
        if position + 1 > settled_until:
            before = table.first, table.end
            table.drop_before(group.first_needed_block(position))
            table.pages += range(group.num_blocks(position + 1, position + 1) - table.end)
            settled_until = group.settled_until(table.first, table.end)
            assert before != (table.first, table.end), "nothing had to change"
        assert table.first == group.first_needed_block(position), "a page could have been given back"
        assert table.end == position // block_size + 1


@pytest.mark.parametrize("num_tokens", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_prefix_is_the_longest_after_which_the_next_token_sees_cached_blocks_alone(
    num_tokens: int | None, block_size: int
) -> None:
    group = make_group(num_tokens, block_size)
    for bits in range(2**NUM_BLOCKS):
        cached = {block for block in range(NUM_BLOCKS) if bits >> block & 1}
        limit = NUM_BLOCKS - bits % 3
        longest = max(
            blocks for blocks in range(limit + 1) if seen_blocks(num_tokens, block_size, blocks * block_size) <= cached
        )
        assert group.longest_prefix(cached.__contains__, limit) == longest


def test_a_full_group_takes_a_prompt_at_once_and_a_window_chunk_by_chunk() -> None:
    assert make_group(None, 4).num_blocks(100, 10) == 25
    assert make_group(6, 4).num_blocks(100, 10) == 3


def test_a_table_keeps_the_places_of_blocks_without_a_page() -> None:
    table = BlockTable(make_group(6, 4), 0, [7, 8, 9])
    assert table.drop_before(2) == [7, 8]
    assert (table.first, table.end, table.pages) == (2, 3, [9])
    assert table.on_wire() == [0, 0, 9]
