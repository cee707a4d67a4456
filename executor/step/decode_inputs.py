"""Builds the inputs of decode steps, always in the same memory, so that a recording can read them again."""

from typing import NamedTuple

import numpy as np
import torch

from quire.core.wire.protocol import StepPlan
from quire.executor.step.input_batch import GroupPages, InputBatch
from quire.executor.step.request_table import RequestTable
from quire.executor.transfers import MirroredColumns
from quire.ops.recurrent import StateRows

MAX_ROWS = 512


class _Views(NamedTuple):
    """The batch of steps with one number of rows, and the host's side of its columns, each [num_rows].

    Attributes:
        places: of the tokens in the request table.
        slot_mappings: by KV group.
        used: elements of all columns together.
    """

    batch: InputBatch
    places: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    is_new: np.ndarray
    slot_mappings: list[np.ndarray]
    used: int


class DecodeInputs:
    """Builds the batches of steps in which every row computes one token and samples the next.

    One copy brings a step's columns to the device. All batches share memory, so a batch is valid until the next is
    built. Steps of equally many rows share one batch.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        rows = min(table.max_num_seqs, MAX_ROWS)
        self._max_rows = rows
        self._num_columns = 5 + len(table.block_tables)
        self._columns = MirroredColumns(self._num_columns, rows, table.device)
        self._rows = np.arange(rows)
        self._rows_there = torch.arange(rows, device=table.device)
        self._query_lens = np.ones(rows, np.int64)
        self._seq_lens = np.ones(rows, np.int64)
        self._starts = torch.arange(rows + 1)
        self._block_tables = [np.zeros((rows, pages.shape[1]), np.int32) for pages in table.block_tables]
        self._views: dict[int, _Views] = {}  # by number of rows

    def build(self, plan: StepPlan) -> InputBatch | None:
        """Fills the tensors of `plan`, whose changes the table already has; None if the step is no such decode step."""
        num_rows = len(plan.slots)
        if num_rows > self._max_rows or plan.num_scheduled.count(1) < num_rows or not all(plan.num_wanted):
            return None
        views = self._views.get(num_rows) or self._make_views(num_rows)
        batch, slots, positions = views.batch, views.slots, views.positions
        table, size = self._table, self._table.block_size
        slots[:] = plan.slots
        positions[:] = plan.num_computed
        views.places[:] = table.places(slots, positions)
        np.add(positions, 1, out=batch.seq_lens)
        np.equal(positions, 0, out=views.is_new)
        num_pages = max(plan.num_computed) // size + 1
        page, offset = np.divmod(positions, size)
        for block_tables, pages, slot_mapping in zip(table.block_tables, batch.pages, views.slot_mappings, strict=True):
            pages.block_tables[:, :num_pages] = block_tables[slots, :num_pages]
            np.multiply(pages.block_tables[self._rows[:num_rows], page], size, out=slot_mapping, dtype=np.int64)
            slot_mapping += offset
        self._columns.upload(num_rows, views.used)
        table.take(views.places, self._columns.there[num_rows : 2 * num_rows], out=batch.token_ids)
        return batch

    def _make_views(self, num_rows: int) -> _Views:
        used = self._num_columns * num_rows
        # The token ids come first: the table writes them where they are, so they are not copied.
        _, places, slots, positions, is_new, *slot_mappings = self._columns.host[:used].reshape(-1, num_rows)
        there = self._columns.there[:used].view(-1, num_rows).unbind()
        block_tables = [table[:num_rows] for table in self._block_tables]
        seq_lens = self._seq_lens[:num_rows]
        batch = InputBatch(
            token_ids=there[0],
            positions=there[3],
            pages=[GroupPages(mapping, table) for mapping, table in zip(there[5:], block_tables, strict=True)],
            query_lens=self._query_lens[:num_rows],
            seq_lens=seq_lens,
            num_wanted=self._query_lens[:num_rows],
            wanted_tokens=self._rows_there[:num_rows],
            wanted_slots=slots,
            wanted_positions=seq_lens,
            rows=StateRows(there[2], self._starts[: num_rows + 1], there[4].view(torch.bool)[:num_rows]),
        )
        views = _Views(batch, places, slots, positions, is_new.view(np.bool_)[:num_rows], slot_mappings, used)
        self._views[num_rows] = views
        return views
