"""Moves of pages between tiers: bytes come back, slow ones are reported when done, states never look like NaN."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quire.core.wire.kv_groups import NO_PAGE
from quire.core.wire.page_moves import PageMove, Tier
from quire.core.wire.protocol import NewSlot, StepPlan
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.memory.state_layout import StateLayout
from quire.executor.step.page_moves import PageMoves
from quire.executor.step.page_tiers import CachePages, SlotStates
from quire.executor.transfers import Transfer

LAYERS = [
    LayerState(((3, 5), (2, 4, 4)), (torch.bfloat16, torch.float32)),
    LayerState(((7,),), (torch.bfloat16,)),
]

BLOCK_SIZE = 4


def plan(**fields) -> StepPlan:
    columns = {name: [] for name in ("slots", "num_computed", "num_scheduled", "num_wanted")}
    return StepPlan(0, [], **({"admitted": [], "appended_pages": []} | columns | fields))


def new(slot: int, pages: list[list[int]]) -> NewSlot:
    return NewSlot(slot, [1], 1, pages, SamplingParams())


def restore(pages: list[int], slot: int) -> PageMove:
    return PageMove("device", pages, "state", [slot])


def snapshot(slot: int, pages: list[int]) -> PageMove:
    return PageMove("state", [slot], "device", pages)


@pytest.mark.parametrize("row_bytes", [[64, 48], [200], [16, 16, 16]])
def test_a_restored_state_is_the_one_that_was_copied(row_bytes: list[int]) -> None:
    layout = StateLayout(LAYERS, torch.device("cpu"))
    assert layout.state_bytes == 30 + 128 + 14
    num_pages = -(-layout.state_bytes // sum(row_bytes))
    states = layout.allocate(4)
    assert [[list(tensor.shape) for tensor in layer] for layer in states] == [[[4, 3, 5], [4, 2, 4, 4]], [[4, 7]]]
    pages = [torch.zeros(20, size, dtype=torch.uint8) for size in row_bytes]
    moves = PageMoves(CachePages(pages), {"state": SlotStates(states)}, BLOCK_SIZE)
    parts = [tensor for layer in states for tensor in layer]
    for part in parts:
        part.normal_()
    before = [part.clone() for part in parts]
    first, second = list(range(num_pages)), list(range(19, 19 - num_pages, -1))
    moves.after(plan(moves_after=[snapshot(2, first), snapshot(0, second)]))
    for part in parts:
        part.fill_(torch.nan)
    moves.before(plan(admitted=[new(1, []), new(3, [])], moves_before=[restore(second, 1), restore(first, 3)]))
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part[1], old[0])
        assert torch.equal(part[3], old[2])
        assert part[[0, 2]].isnan().all()


def states_and_pages() -> tuple[PageMoves, Tensor, Tensor]:
    """Moves between two states of NaN, six pages of sevens, and four pages of the host."""
    [[state]] = StateLayout([LayerState(((4,),), (torch.float32,))], torch.device("cpu")).allocate(2)
    state.fill_(torch.nan)
    pages = torch.full((6, 16), 7, dtype=torch.uint8)
    host = CachePages([torch.zeros(4, 16, dtype=torch.uint8)])
    return PageMoves(CachePages([pages]), {"state": SlotStates([[state]]), "host": host}, BLOCK_SIZE), state, pages


def test_pages_are_read_before_the_same_plan_gives_them_away_and_cleared_then() -> None:
    moves, state, pages = states_and_pages()
    state[1] = 0
    moves.after(plan(moves_after=[snapshot(0, [3])]))
    assert pages[3].view(torch.float32).isnan().all()
    admitted = [new(0, [[1, 3]]), new(1, [[2]])]
    moves.before(plan(admitted=admitted, appended_pages=[(1, [[4]])], moves_before=[restore([3], 1)]))
    assert state[1].isnan().all(), "the snapshot was read first"
    assert not pages[3].any()
    assert (pages[[1, 2, 4]] == 7).all(), "pages of keys and values keep what they hold: it may be a prefix"
    pages[3] = 9
    moves.before(plan(appended_pages=[(1, [[3]])]))
    assert (pages[3] == 9).all(), "it no longer holds a snapshot"


def test_blocks_of_a_prefix_without_a_page_clear_no_snapshot_in_page_0() -> None:
    """A window's block table begins with page 0 for such blocks, which may be a page of somebody's snapshot."""
    moves, _, pages = states_and_pages()
    moves.after(plan(moves_after=[snapshot(0, [0]), snapshot(0, [3])]))
    rows = {"slots": [1], "num_computed": [2 * BLOCK_SIZE], "num_scheduled": [1], "num_wanted": [0]}
    moves.before(plan(admitted=[new(1, [[NO_PAGE, 1, 3], [4, 5, 2]])], **rows))
    assert pages[0].view(torch.float32).isnan().all()
    assert not pages[3].any(), "the block after the prefix"


def test_a_page_of_the_host_comes_back_as_what_it_was() -> None:
    """Keys and values stay when the page gets its owner; the bytes of a state are cleared."""
    moves, _, pages = states_and_pages()
    pages[1] = 5
    moves.after(plan(moves_after=[snapshot(0, [2])]))
    out = [PageMove("device", [1, 2], "host", [3, 0])]
    back = [PageMove("host", [3, 0], "device", [2, 4])]
    moves.before(plan(moves_before=out))
    pages[[1, 2]] = 0
    moves.before(plan(moves_before=back, admitted=[new(0, [[2]])]))
    assert (pages[2] == 5).all(), "it held a state before, and holds keys and values now"
    assert pages[4].view(torch.float32).isnan().all()
    moves.before(plan(appended_pages=[(0, [[4]])]))
    assert not pages[4].any()


def test_moves_are_made_in_the_order_of_the_plan() -> None:
    """A page is saved, gets other content, and is saved once more."""
    moves, _, pages = states_and_pages()
    pages[0], pages[1] = 1, 2
    steps: list[tuple[Tier, int, Tier, int]] = [
        ("device", 0, "host", 0), ("device", 1, "device", 0), ("device", 0, "host", 1), ("host", 0, "device", 4),
        ("host", 1, "device", 5),
    ]  # fmt: skip
    moves.before(plan(moves_before=[PageMove(a, [i], b, [j], move_id=7) for a, i, b, j in steps]))
    assert pages[[4, 5], 0].tolist() == [1, 2]
    assert moves.drain() == [7] * 5
    assert moves.drain() == []


class SlowRead:
    """A read that is done once somebody says so, or waits for it."""

    def __init__(self, content: Tensor) -> None:
        self._content = content
        self.is_done = False

    def values(self) -> Sequence[Tensor]:
        self.is_done = True
        return [self._content]


class SlowPages(CachePages):
    """The pages of a disk, say."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__([tensor])
        self.reads: list[SlowRead] = []

    def read(self, pages: list[int]) -> Transfer:
        [content] = super().read(pages).values()
        self.reads.append(SlowRead(content))
        return self.reads[-1]  # type: ignore[return-value]


def test_slow_moves_end_in_later_plans_and_a_plan_without_rows_waits_for_one() -> None:
    pages, slow = torch.zeros(4, 16, dtype=torch.uint8), SlowPages(torch.arange(64, dtype=torch.uint8).view(4, 16))
    moves = PageMoves(CachePages([pages]), {"host": slow}, BLOCK_SIZE)
    loads = [PageMove("host", [page], "device", [page], move_id=page) for page in range(3)]
    moves.before(plan(slots=[0], moves_before=loads))
    assert moves.drain() == []
    slow.reads[1].is_done = True
    moves.before(plan(slots=[0]))
    assert moves.drain() == [1]
    assert pages[:, 0].tolist() == [0, 16, 0, 0]
    moves.before(plan())
    assert moves.drain() == [0]
    moves.before(plan(moves_before=[PageMove("host", [3], "device", [3])]))
    assert moves.drain() == [2], "the plan has no rows"
    assert torch.equal(pages, torch.arange(64, dtype=torch.uint8).view(4, 16)), "a move without an id is done at once"


def test_a_rank_without_recurrent_layers_skips_moves_of_states() -> None:
    pages = torch.full((4, 1), 7, dtype=torch.uint8)
    moves = PageMoves(CachePages([pages]), {}, BLOCK_SIZE)
    moves.before(plan(moves_before=[restore([1], 0)]))
    moves.after(plan(moves_after=[snapshot(0, [2])]))
    assert (pages == 7).all()
    with pytest.raises(AssertionError, match="the tier 'host', which this worker does not have"):
        moves.before(plan(moves_before=[PageMove("host", [1], "device", [2])]))
