"""The inputs of decode steps: the same as those of other steps, in memory that stays in place."""

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch

from quire.core.wire.protocol import NewSlot, StepPlan
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.step.decode_inputs import DecodeInputs
from quire.executor.step.input_batch import InputBatch, build_input_batch
from quire.executor.step.request_table import RequestTable
from tests.executor.pretend_device import PretendDevice

BLOCK_SIZE = 4
LENGTHS = [1, 3, 4, 5, 17, 32, 33, 58, 60]
"""Tokens that are known of each slot's request."""


@pytest.fixture(params=["cpu", "cuda"])
def table(request: pytest.FixtureRequest) -> Iterator[RequestTable]:
    """On the CPU, and on an accelerator that is not there."""
    with PretendDevice() if request.param == "cuda" else contextlib.nullcontext():
        yield make_table(torch.device(request.param))


def make_table(device: torch.device) -> RequestTable:
    rng = random.Random(0)
    table = RequestTable(len(LENGTHS), 100, BLOCK_SIZE, device, num_kv_groups=2)
    for slot, length in enumerate(LENGTHS):
        num_pages = length // BLOCK_SIZE + 1
        pages = [[rng.randrange(2**28) for _ in range(num_pages)] for _ in range(2)]  # slots of some take over 32 bits
        table.admit(NewSlot(slot, [rng.randrange(1000) for _ in range(length)], 1, pages, SamplingParams()))
    return table


def decode(slots: list[int]) -> StepPlan:
    """Computes the last token of each slot."""
    num_rows = len(slots)
    return StepPlan(1, [], [], slots, [LENGTHS[slot] - 1 for slot in slots], [1] * num_rows, [1] * num_rows, [])


def columns(batch: InputBatch) -> list[list[int]]:
    return [
        batch.token_ids.tolist(), batch.positions.tolist(), batch.query_lens.tolist(),
        batch.seq_lens.tolist(), batch.num_wanted.tolist(), batch.wanted_tokens.tolist(), batch.wanted_slots.tolist(),
        batch.wanted_positions.tolist(), *(pages.slot_mapping.tolist() for pages in batch.pages),
        *(column.tolist() for column in batch.rows or ()),
    ]  # fmt: skip


def test_they_are_what_any_step_gets_and_stay_in_place(table: RequestTable) -> None:
    inputs = DecodeInputs(table)
    rng = random.Random(1)
    batches: dict[int, InputBatch] = {}
    for _ in range(60):
        plan = decode(rng.sample(range(len(LENGTHS)), rng.randint(1, len(LENGTHS))))
        batch, expected = inputs.build(plan), build_input_batch(plan, table, has_states=True)
        assert batch is not None
        assert columns(batch) == columns(expected)
        for pages, own in zip(batch.pages, expected.pages, strict=True):
            for row, seq_len in enumerate(batch.seq_lens):
                num_pages = -(-seq_len // BLOCK_SIZE)
                assert pages.block_tables[row, :num_pages].tolist() == own.block_tables[row, :num_pages].tolist()
        for own in (batch, expected):
            assert own.rows is not None
            on_device = (own.token_ids, own.positions, own.wanted_tokens, own.rows.slots, own.rows.is_new)
            assert {each.device.type for each in on_device} == {table.device.type}
            assert {each.slot_mapping.device.type for each in own.pages} == {table.device.type}
            assert own.rows.starts.device.type == "cpu"
        assert batches.setdefault(len(plan.slots), batch) is batch


def test_other_steps_have_none(table: RequestTable, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = DecodeInputs(table)
    assert inputs.build(StepPlan(1, [], [], [3, 4], [4, 3], [1, 2], [1, 1], [])) is None, "part of a prompt"
    assert inputs.build(StepPlan(1, [], [], [3, 4], [4, 3], [1, 1], [1, 0], [])) is None, "no sample"
    monkeypatch.setattr("quire.executor.step.decode_inputs.MAX_ROWS", 2)
    assert DecodeInputs(table).build(decode([1, 2])) is not None
    assert DecodeInputs(table).build(decode([1, 2, 3])) is None, "more rows than there is room for"
