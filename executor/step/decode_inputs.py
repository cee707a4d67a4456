"""Builds the inputs of decode steps, always in the same memory, so that a recording can read them again."""

from typing import NamedTuple

import numpy as np
import torch

from quire.core.wire.protocol import StepPlan
from quire.executor.step.input_batch import GroupPages, InputBatch
from quire.executor.step.request_table import RequestTable
from quire.ops.recurrent import StateRows

MAX_ROWS = 512


class _Place(NamedTuple):
    """The memory of the inputs of steps with one number of rows: a batch, and NumPy views of its mutable tensors."""

    batch: InputBatch
    token_ids: np.ndarray
    positions: np.ndarray
    slot_mappings: list[np.ndarray]  # by KV group
    is_new: np.ndarray


class DecodeInputs:
    """Builds the batches of steps in which every row computes one token and samples the next.

    All batches share memory, so a batch is valid until the next is built. Steps with equally many rows share one batch.

    Args:
        table: the request table; its device must be the host.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        rows = min(table.max_num_seqs, MAX_ROWS)
        self._max_rows = rows
        self._tokens = np.zeros((2 + len(table.block_tables), rows), np.int64)
        self._rows = np.arange(rows)
        self._query_lens = np.ones(rows, np.int64)
        self._seq_lens = np.ones(rows, np.int64)
        self._slots = np.zeros(rows, np.int64)
        self._starts = np.arange(rows + 1)
        self._is_new = np.zeros(rows, bool)
        self._block_tables = [np.zeros((rows, pages.shape[1]), np.int32) for pages in table.block_tables]
        self._places: dict[int, _Place] = {}  # by number of rows

    def build(self, plan: StepPlan) -> InputBatch | None:
        """Fills the tensors of `plan`, whose changes the table already has; None if the step is no such decode step."""
        num_rows = len(plan.slots)
        if num_rows > self._max_rows or plan.num_scheduled.count(1) < num_rows or not all(plan.num_wanted):
            return None
        place = self._places.get(num_rows) or self._make_place(num_rows)
        batch, positions = place.batch, place.positions
        table, size = self._table, self._table.block_size
        slots = batch.wanted_slots
        slots[:] = plan.slots
        positions[:] = plan.num_computed
        np.add(positions, 1, out=batch.seq_lens)
        np.equal(positions, 0, out=place.is_new)
        num_pages = max(plan.num_computed) // size + 1
        page, offset = np.divmod(positions, size)
        for block_tables, pages, slot_mapping in zip(table.block_tables, batch.pages, place.slot_mappings, strict=True):
            pages.block_tables[:, :num_pages] = block_tables[slots, :num_pages]
            np.multiply(pages.block_tables[self._rows[:num_rows], page], size, out=slot_mapping, dtype=np.int64)
            slot_mapping += offset
        place.token_ids[:] = table.on_host(slots, positions)
        return batch

    def _make_place(self, num_rows: int) -> _Place:
        token_ids, positions, *slot_mappings = (column[:num_rows] for column in self._tokens)
        seq_lens, slots, is_new = self._seq_lens[:num_rows], self._slots[:num_rows], self._is_new[:num_rows]
        batch = InputBatch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            pages=[
                GroupPages(torch.from_numpy(slot_mapping), block_tables[:num_rows])
                for slot_mapping, block_tables in zip(slot_mappings, self._block_tables, strict=True)
            ],
            query_lens=self._query_lens[:num_rows],
            seq_lens=seq_lens,
            num_wanted=self._query_lens[:num_rows],
            wanted_tokens=torch.from_numpy(self._rows[:num_rows]),
            wanted_slots=slots,
            wanted_positions=seq_lens,
            rows=StateRows(*map(torch.from_numpy, (slots, self._starts[: num_rows + 1], is_new))),
        )
        place = self._places[num_rows] = _Place(batch, token_ids, positions, slot_mappings, is_new)
        return place
