"""The inputs of decode steps: the same as those of other steps, in memory that stays in place."""

import contextlib
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from quire.core.wire.protocol import NewSlot, StepPlan
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.step.decode_inputs import DecodeInputs
from quire.executor.step.input_batch import InputBatch, StepShape, build_input_batch
from quire.executor.step.request_table import RequestTable
from tests.executor.pretend_device import PretendDevice

BLOCK_SIZE = 4
SPARE_PAGE = 12345
LENGTHS = [1, 3, 4, 5, 17, 32, 33, 58, 60]
"""Tokens that are known of each slot's request."""


@pytest.fixture(params=["cpu", "cuda"])
def table(request: pytest.FixtureRequest) -> Iterator[RequestTable]:
    """On the CPU, and on an accelerator that is not there."""
    with PretendDevice() if request.param == "cuda" else contextlib.nullcontext():
        yield make_table(torch.device(request.param))


def make_table(device: torch.device) -> RequestTable:
    rng = random.Random(0)
    table = RequestTable(len(LENGTHS), 100, BLOCK_SIZE, device, num_kv_groups=2, spare_page=SPARE_PAGE)
    for slot, length in enumerate(LENGTHS):
        num_pages = length // BLOCK_SIZE + 1
        pages = [[rng.randrange(2**28) for _ in range(num_pages)] for _ in range(2)]  # slots of some take over 32 bits
        table.admit(NewSlot(slot, [rng.randrange(1000) for _ in range(length)], 1, pages, SamplingParams()))
    return table


def decode(slots: list[int]) -> StepPlan:
    """Computes the last token of each slot."""
    num_rows = len(slots)
    return StepPlan(1, [], [], slots, [LENGTHS[slot] - 1 for slot in slots], [1] * num_rows, [1] * num_rows, [])


def exactly(num_rows: int, longest: int) -> StepShape:
    """No padding, and room for all lengths."""
    return StepShape(num_rows, 104)


def padded(num_rows: int, longest: int) -> StepShape:
    return StepShape(-(-num_rows // 4) * 4, 24 if longest <= 24 else 104)


def columns(batch: InputBatch) -> list[list[int]]:
    """The rows of a step without padding."""
    num_rows = len(batch.num_wanted)
    each = [
        batch.read_token_ids(), batch.positions, batch.query_lens, batch.seq_lens, batch.wanted_tokens,
        *(pages.slot_mapping for pages in batch.pages), *(batch.rows or ())[:3],
    ]  # fmt: skip
    starts = batch.rows.starts[: num_rows + 1].tolist() if batch.rows else []
    sampled = [batch.num_wanted.tolist(), batch.wanted_slots.tolist(), batch.wanted_positions.tolist()]
    return [*(column[:num_rows].tolist() for column in each), starts, *sampled]


@pytest.mark.parametrize("choose_shape", [exactly, padded])
def test_they_are_what_any_step_gets_and_stay_in_place(
    table: RequestTable, choose_shape: Callable[[int, int], StepShape]
) -> None:
    inputs = DecodeInputs(table, choose_shape)
    rng = random.Random(1)
    places: dict[StepShape | None, list[int]] = {}
    for _ in range(60):
        plan = decode(rng.sample(range(len(LENGTHS)), rng.randint(1, len(LENGTHS))))
        batch, expected = inputs.build(plan), build_input_batch(plan, table, has_states=True)
        assert batch is not None
        assert columns(batch) == columns(expected)
        num_rows = len(plan.slots)
        assert batch.shape == choose_shape(num_rows, max(batch.wanted_positions))
        for pages, own in zip(batch.pages, expected.pages, strict=True):
            assert pages.there is not None
            for row, seq_len in enumerate(batch.wanted_positions):
                num_pages = -(-seq_len // BLOCK_SIZE)
                assert pages.block_tables[row, :num_pages].tolist() == own.block_tables[row, :num_pages].tolist()
                assert pages.there.block_tables[row, :num_pages].tolist() == own.block_tables[row, :num_pages].tolist()
            assert pages.block_tables.shape == (batch.shape.num_rows, batch.shape.max_seq_len // BLOCK_SIZE)
            assert pages.there.query_starts.tolist() == list(range(batch.shape.num_rows + 1))
            assert pages.there.seq_lens[:num_rows].tolist() == batch.wanted_positions.tolist()
            assert (pages.there.max_query_len, pages.there.max_seq_len) == (1, batch.shape.max_seq_len)
        for own in (batch, expected):
            assert own.rows is not None
            on_device = (own.token_ids, own.positions, own.wanted_tokens, own.rows.slots, own.rows.is_new)
            assert {each.device.type for each in on_device} == {table.device.type}
            assert {each.slot_mapping.device.type for each in own.pages} == {table.device.type}
            assert own.rows.starts.device.type == "cpu"
        tensors = [batch.token_ids, batch.positions, batch.wanted_tokens, *(batch.rows or ())[:3]]
        tensors += [x for pages in batch.pages for x in (pages.slot_mapping, *(pages.there or ())[:3])]
        here = [tensor.data_ptr() for tensor in tensors]
        assert places.setdefault(batch.shape, here) == here, "a recording of the shape finds them there"


@pytest.mark.parametrize("table", ["cpu"], indirect=True)
def test_steps_that_check_drafts(table: RequestTable) -> None:
    inputs, rng = DecodeInputs(table, exactly, drafts_as="sequences"), random.Random(2)
    places: dict[StepShape | None, list[int]] = {}
    for _ in range(60):
        slots = rng.sample(range(len(LENGTHS)), rng.randint(1, 4))
        lens = [rng.randint(1, min(3, LENGTHS[slot])) for slot in slots]
        computed = [LENGTHS[slot] - count for slot, count in zip(slots, lens, strict=True)]
        plan = StepPlan(1, [], [], slots, computed, lens, lens, [])
        batch, expected = inputs.build(plan), build_input_batch(plan, table)
        assert batch is not None
        checks_drafts = sum(lens) > len(slots)
        assert batch.shape == exactly(sum(lens), 0)._replace(num_sequences=len(slots) if checks_drafts else None)
        assert (batch.rows is None) == checks_drafts, "a state has one row a sequence"
        for name in ("token_ids", "positions", "query_lens", "seq_lens", "num_wanted", "wanted_tokens"):
            assert getattr(batch, name).tolist() == getattr(expected, name).tolist(), name
        assert batch.wanted_slots.tolist() == expected.wanted_slots.tolist()
        assert batch.wanted_positions.tolist() == expected.wanted_positions.tolist()
        for pages, own in zip(batch.pages, expected.pages, strict=True):
            assert pages.slot_mapping.tolist() == own.slot_mapping.tolist()
            for row, seq_len in enumerate(expected.seq_lens):
                num_pages = -(-seq_len // BLOCK_SIZE)
                assert pages.block_tables[row, :num_pages].tolist() == own.block_tables[row, :num_pages].tolist()
        arrays = [batch.query_lens, batch.seq_lens, *(pages.block_tables for pages in batch.pages)]
        here = [batch.token_ids.data_ptr(), batch.positions.data_ptr(), *(each.ctypes.data for each in arrays)]
        assert places.setdefault(batch.shape, here) == here, "a recording of the shape finds them there"
    assert any(shape and shape.num_sequences == 2 for shape in places)


@pytest.mark.parametrize("choose_shape", [exactly, padded])
def test_drafts_may_be_rows_of_their_own(table: RequestTable, choose_shape: Callable[[int, int], StepShape]) -> None:
    inputs, rng = DecodeInputs(table, choose_shape, drafts_as="rows"), random.Random(3)
    places: dict[StepShape | None, list[int]] = {}
    for _ in range(40):
        slots = rng.sample(range(len(LENGTHS)), rng.randint(1, 4))
        lens = [rng.randint(1, min(3, LENGTHS[slot])) for slot in slots]
        computed = [LENGTHS[slot] - count for slot, count in zip(slots, lens, strict=True)]
        plan = StepPlan(1, [], [], slots, computed, lens, lens, [])
        batch, expected = inputs.build(plan), build_input_batch(plan, table)
        assert batch is not None
        num_rows, checks_drafts = sum(lens), sum(lens) > len(slots)
        longest = max(LENGTHS[slot] for slot in slots)
        assert batch.shape == choose_shape(num_rows, longest)._replace(are_apart=not checks_drafts)
        for name in ("positions", "wanted_tokens"):
            assert getattr(batch, name)[:num_rows].tolist() == getattr(expected, name).tolist(), name
        assert batch.read_token_ids()[:num_rows].tolist() == expected.read_token_ids().tolist()
        assert batch.wanted_slots.tolist() == expected.wanted_slots.tolist()
        assert batch.wanted_positions.tolist() == expected.wanted_positions.tolist()
        assert batch.seq_lens[:num_rows].tolist() == expected.wanted_positions.tolist()
        assert {*batch.query_lens.tolist(), *batch.num_wanted.tolist()} == {1}
        for pages, own in zip(batch.pages, expected.pages, strict=True):
            assert pages.there is not None
            assert pages.there.are_apart != checks_drafts
            assert pages.slot_mapping[:num_rows].tolist() == own.slot_mapping.tolist()
            assert pages.there.seq_lens[:num_rows].tolist() == expected.wanted_positions.tolist()
            owners = [row for row, count in enumerate(lens) for _ in range(count)]
            for row, (owner, position) in enumerate(zip(owners, expected.wanted_positions.tolist(), strict=True)):
                own_pages = own.block_tables[owner, : -(-position // BLOCK_SIZE)].tolist()
                assert pages.block_tables[row, : len(own_pages)].tolist() == own_pages
                assert pages.there.block_tables[row, : len(own_pages)].tolist() == own_pages
            assert all(pages.block_tables[row, 0] == SPARE_PAGE for row in range(num_rows, batch.shape.num_rows))
        here = [batch.positions.data_ptr(), *(x.data_ptr() for pages in batch.pages for x in (pages.there or ())[:3])]
        assert places.setdefault(batch.shape, here) == here, "a recording of the shape finds them there"


def test_padding_is_in_a_page_of_nobody(table: RequestTable) -> None:
    inputs = DecodeInputs(table, padded)
    inputs.build(decode([4, 5, 6, 7, 8, 0, 1, 2]))
    batch = inputs.build(decode([4, 5, 6]))
    assert batch is not None
    assert [len(x) for x in (batch.token_ids, batch.positions, batch.query_lens, batch.wanted_tokens)] == [4] * 4
    assert (batch.positions[3], batch.query_lens[3], batch.seq_lens[3]) == (0, 1, 1)
    for pages in batch.pages:
        assert pages.there is not None
        assert pages.slot_mapping[3] == SPARE_PAGE * BLOCK_SIZE
        assert pages.block_tables[3, 0] == pages.there.block_tables[3, 0] == SPARE_PAGE
        assert pages.there.seq_lens[3] == 1, "its outputs are numbers"
    assert batch.rows is not None
    assert (batch.rows.slots[3], batch.rows.is_new[3]) == (-1, True)
    assert len(batch.num_wanted) == len(batch.wanted_slots) == len(batch.wanted_positions) == 3


def test_other_steps_have_none(table: RequestTable, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = DecodeInputs(table, exactly)
    assert inputs.build(StepPlan(1, [], [], [3, 4], [4, 3], [1, 2], [1, 1], [])) is None, "part of a prompt"
    assert inputs.build(StepPlan(1, [], [], [3, 4], [4, 3], [1, 1], [1, 0], [])) is None, "no sample"
    assert inputs.build(StepPlan(1, [], [], [3, 4], [4, 3], [1, 2], [1, 2], [])) is None, "drafts"
    monkeypatch.setattr("quire.executor.step.decode_inputs.MAX_ROWS", 2)
    assert DecodeInputs(table, exactly).build(decode([1, 2])) is not None
    assert DecodeInputs(table, exactly).build(decode([1, 2, 3])) is None, "more rows than there is room for"
