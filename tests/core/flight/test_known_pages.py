"""Which rows a replay can compute that begins in the middle of an engine's life."""

from quire.core.flight.known_pages import KnownPages
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import NewSlot, StepPlan
from quire.core.wire.sampling_params import SamplingParams

GROUP = KVGroupSpec("full", [0], 1024)
BLOCK = 4


def plan(
    step_id: int,
    rows: list[tuple[int, int, int]],
    admitted: list[tuple[int, list[int]]] | None = None,
    appended: list[tuple[int, list[int]]] | None = None,
    released: list[int] | None = None,
) -> StepPlan:
    """`rows` are (slot, num_computed, num_scheduled), and pages those of the one group."""
    return StepPlan(
        step_id,
        released or [],
        [NewSlot(slot, [1] * 9, 9, [pages], SamplingParams()) for slot, pages in admitted or []],
        [slot for slot, _, _ in rows],
        [start for _, start, _ in rows],
        [count for _, _, count in rows],
        [1] * len(rows),
        [(slot, [pages]) for slot, pages in appended or []],
        outputs=[(len(rows) - 1, "prompt_logprobs")] if len(rows) > 1 else [],
    )


def test_a_whole_recording_runs_as_it_is() -> None:
    pages = KnownPages([GROUP], BLOCK, is_whole=True)
    wanted = plan(0, [(3, 8, 1)])
    assert pages.known_part(wanted) == (wanted, [0])


def test_rows_of_earlier_requests_are_left_out() -> None:
    pages = KnownPages([GROUP], BLOCK, is_whole=False)
    kept, rows = pages.known_part(plan(7, [(0, 20, 1), (1, 0, 6)], admitted=[(1, [5, 6])], appended=[(0, [9])]))
    assert (rows, kept.slots, kept.num_scheduled) == ([1], [1], [6])
    assert [new.slot for new in kept.admitted] == [1]
    assert kept.appended_pages == []
    assert kept.outputs == [(0, "prompt_logprobs")]


def test_a_prefix_counts_if_it_was_computed_here() -> None:
    pages = KnownPages([GROUP], BLOCK, is_whole=False)
    pages.known_part(plan(0, [(1, 0, 8)], admitted=[(1, [5, 6])]))
    assert pages.known_part(plan(1, [(2, 8, 1)], admitted=[(2, [5, 6, 7])]))[1] == [0]
    assert pages.known_part(plan(2, [(3, 8, 1)], admitted=[(3, [5, 8, 9])]))[1] == []


def test_pages_that_another_request_has_written_are_forgotten() -> None:
    pages = KnownPages([GROUP], BLOCK, is_whole=False)
    pages.known_part(plan(0, [(1, 0, 8)], admitted=[(1, [5, 6])]))
    pages.known_part(plan(1, [(0, 40, 1)], appended=[(0, [6])], released=[1]))  # slot 0 is unknown
    assert pages.known_part(plan(2, [(2, 8, 1)], admitted=[(2, [5, 6, 7])]))[1] == []
    assert pages.known_part(plan(3, [(3, 4, 1)], admitted=[(3, [5, 8])]))[1] == [0]
