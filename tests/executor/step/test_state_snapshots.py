"""Copies of recurrent states in pages: the bytes come back, and pages that will hold tokens do not look like NaN."""

import pytest
import torch

from quire.core.wire.protocol import NewSlot, StepPlan
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.memory.state_layout import StateLayout
from quire.executor.step.state_snapshots import StateSnapshots

LAYERS = [
    LayerState(((3, 5), (2, 4, 4)), (torch.bfloat16, torch.float32)),
    LayerState(((7,),), (torch.bfloat16,)),
]


def plan(**fields) -> StepPlan:
    return StepPlan(0, [], **({"admitted": [], "appended_pages": []} | fields), **{
        name: [] for name in ("slots", "num_computed", "num_scheduled", "num_wanted")
    })  # fmt: skip


def new(slot: int, pages: list[list[int]], snapshot: list[int]) -> NewSlot:
    return NewSlot(slot, [1], 1, pages, SamplingParams(), snapshot=snapshot)


@pytest.mark.parametrize("row_bytes", [[64, 48], [200], [16, 16, 16]])
def test_a_restored_state_is_the_one_that_was_copied(row_bytes: list[int]) -> None:
    layout = StateLayout(LAYERS, torch.device("cpu"))
    assert layout.state_bytes == 30 + 128 + 14
    num_pages = -(-layout.state_bytes // sum(row_bytes))
    states = layout.allocate(4)
    assert [[list(tensor.shape) for tensor in layer] for layer in states] == [[[4, 3, 5], [4, 2, 4, 4]], [[4, 7]]]
    pages = [torch.zeros(20, size, dtype=torch.uint8) for size in row_bytes]
    snapshots = StateSnapshots(states, pages)
    parts = [tensor for layer in states for tensor in layer]
    for part in parts:
        part.normal_()
    before = [part.clone() for part in parts]
    first, second = list(range(num_pages)), list(range(19, 19 - num_pages, -1))
    snapshots.take(plan(snapshots=[(2, first), (0, second)]))
    for part in parts:
        part.fill_(torch.nan)
    snapshots.apply(plan(admitted=[new(1, [], second), new(3, [], first)]))
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part[1], old[0])
        assert torch.equal(part[3], old[2])
        assert part[[0, 2]].isnan().all()


def test_pages_are_read_before_the_same_plan_gives_them_away_and_cleared_then() -> None:
    states = StateLayout([LayerState(((4,),), (torch.float32,))], torch.device("cpu")).allocate(2)
    pages = torch.full((6, 16), 7, dtype=torch.uint8)
    snapshots = StateSnapshots(states, [pages])
    [[state]] = states
    state[0] = torch.nan
    snapshots.take(plan(snapshots=[(0, [3])]))
    assert pages[3].view(torch.float32).isnan().all()
    snapshots.apply(plan(admitted=[new(0, [[1, 3]], []), new(1, [[2]], [3])], appended_pages=[(1, [[4]])]))
    assert state[1].isnan().all(), "the snapshot was read first"
    assert not pages[3].any()
    assert (pages[[1, 2, 4]] == 7).all(), "pages of keys and values keep what they hold: it may be a prefix"
    pages[3] = 9
    snapshots.apply(plan(appended_pages=[(1, [[3]])]))
    assert (pages[3] == 9).all(), "it no longer holds a snapshot"
