"""KV groups of pipeline stages as one list."""

from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.memory.stage_groups import group_numbers, join_stages


def full(layers: list[int], page_bytes: int) -> KVGroupSpec:
    return KVGroupSpec("full", layers, page_bytes)


def window(layers: list[int], page_bytes: int, size: int = 8) -> KVGroupSpec:
    return KVGroupSpec("window", layers, page_bytes, window=size)


def state(layers: list[int], page_bytes: int, state_bytes: int, interval: int | None = 512) -> KVGroupSpec:
    return KVGroupSpec("recurrent", layers, page_bytes, state_bytes=state_bytes, interval=interval)


def test_one_stage_keeps_its_groups() -> None:
    groups = [full([1], 100), window([0], 100), window([2], 100), state([0, 1], 100, 250)]
    assert join_stages([groups]) == groups
    assert group_numbers(groups[:3], groups) == [0, 1, 2]


def test_the_nth_group_of_a_kind_is_the_same_in_all_stages() -> None:
    first = [window([0, 1], 200), window([2, 3], 200)]
    second = [full([2], 100), window([0], 100), window([1], 100), window([3], 100), window([4], 100, 16)]
    joined = join_stages([first, second])
    assert joined == [
        full([6], 100), window([0, 1, 4], 200), window([2, 3, 5], 200), window([7], 100), window([8], 100, 16),
    ]  # fmt: skip
    assert group_numbers(first, joined) == [1, 2]
    assert group_numbers(second, joined) == [0, 1, 2, 3, 4]


def test_a_snapshot_takes_the_pages_of_the_stage_that_needs_most() -> None:
    first = [full([0], 1000), state([0, 1], 1000, 2500, 512)]
    second = [full([0, 1], 2000), state([0, 1, 2], 2000, 3000, 1024)]
    *_, joined = join_stages([first, second])
    assert (joined.snapshot_pages, joined.interval, joined.layers) == (3, 1024, [0, 1, 2, 3, 4])


def test_stages_without_a_kind_take_part() -> None:
    joined = join_stages([[state([0], 100, 90)], [full([0], 100)], []])
    assert joined == [full([0], 100), state([0], 100, 90)]
