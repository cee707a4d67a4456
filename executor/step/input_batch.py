"""Builds the flat tensors of a forward pass from a step plan and the request table.

All rows of a step lie one after another in each tensor; NumPy computes indices over whole columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from quire.core.wire.prefix_spans import PrefixSpan
from quire.core.wire.protocol import StepPlan
from quire.executor.sampling.recorded_sampler import ChosenRows
from quire.executor.step.encoded_inputs import CrossRows
from quire.executor.step.request_table import RequestTable
from quire.executor.transfers import to_device_together
from quire.ops.backend import DeviceRows
from quire.ops.recurrent import StateRows


class GroupPages(NamedTuple):
    """The places of one step's tokens in the pages of one KV group.

    Attributes:
        slot_mapping: [num_tokens] int64, on the device; place of a token's key and value, page * block_size + offset.
        block_tables: [num_rows, most pages of a row] int32, on the host. Entries past a row's own pages, and before the
            pages that its tokens see, may be any ids.
        there: the step's rows on the device, if they are there already.
    """

    slot_mapping: torch.Tensor
    block_tables: np.ndarray
    there: DeviceRows | None = None


class UnreadTokens(NamedTuple):
    """Tokens that the step itself reads from the request table.

    Attributes:
        memory: the table's, see `RequestTable.memory`.
        places: [num_tokens] int64; indices of `memory`.
    """

    memory: torch.Tensor
    places: torch.Tensor


class StepShape(NamedTuple):
    """The shape of decode steps that one recording serves.

    Attributes:
        num_rows: the rows of their tensors, one for each token; those after a step's own are padding.
        max_seq_len: no sequence is longer.
        num_sequences: those of the tokens, where some are drafts and a sequence is a row of the batch; else None.
        are_apart: as in `DeviceRows`. False where some tokens are drafts, and each is a row of the batch.
    """

    num_rows: int
    max_seq_len: int
    num_sequences: int | None = None
    are_apart: bool = True


@dataclass(frozen=True)
class InputBatch:
    """One step's input. `num_tokens` is the sum of the rows' query lengths.

    In a batch of `DecodeInputs`, the last rows may be padding. No logits of theirs are sampled: `num_wanted`,
    `wanted_slots` and `wanted_positions` have only the step's own rows.

    Attributes:
        token_ids: [num_tokens] int64, on the device; valid once they are read, see `read_token_ids`.
        positions: [num_tokens] int64, on the device; place in the request's sequence.
        pages: by KV group.
        query_lens: [num_rows] int64, on the host; tokens computed in this step.
        seq_lens: [num_rows] int64, on the host; tokens in the cache once this step has run.
        num_wanted: [num_rows] int64, on the host; see `StepPlan`.
        wanted_tokens: [their sum] int64, on the device; flat indices of the tokens at which logits are wanted.
        wanted_slots: like `wanted_tokens`, on the host.
        wanted_positions: like `wanted_tokens`, on the host; the position that the token sampled there will take.
        rows: the rows for recurrent layers; None for a model without.
        prefix_spans: by row, of its sequence. None: no token of the step is in one.
        shape: of a batch of `DecodeInputs`; None for others.
        wanted_places: like `wanted_tokens`, on the device; where the request table will have the tokens sampled there.
            None: they are not known on the device yet.
        adapters: [num_tokens] int64, on the device; each token's adapter, or -1. None: no token has one.
        token_types: [num_tokens] int64, on the device; each token's segment. None: all tokens are of the first.
        cross: by KV group of the kind "cross", what the rows attend to.
        unread: where the device finds `token_ids`. None: they are read.
        chosen: the rows, with padding, whose tokens a recording may choose; None: it may not.
        is_shifted: `positions` are not what the plan has.
        rotary_positions: [num_axes, num_tokens] int64, on the device; see `StepContext`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    pages: list[GroupPages]
    query_lens: np.ndarray
    seq_lens: np.ndarray
    num_wanted: np.ndarray
    wanted_tokens: torch.Tensor
    wanted_slots: np.ndarray
    wanted_positions: np.ndarray
    rows: StateRows | None = None
    prefix_spans: Sequence[Sequence[PrefixSpan]] | None = None
    shape: StepShape | None = None
    wanted_places: torch.Tensor | None = None
    adapters: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    cross: Sequence[CrossRows] = ()
    unread: UnreadTokens | None = None
    chosen: ChosenRows | None = None
    is_shifted: bool = False
    rotary_positions: torch.Tensor | None = None

    def read_token_ids(self) -> torch.Tensor:
        """Returns `token_ids`, as the request table has them when the device comes here."""
        if self.unread is not None:
            self.token_ids.copy_(self.unread.memory[self.unread.places])
        return self.token_ids

    @property
    def is_uncached(self) -> bool:
        """True if nothing is kept of the rows: they are whole sequences of an encoder."""
        return not self.pages and self.rows is None


def build_input_batch(
    plan: StepPlan, table: RequestTable, *, has_states: bool = False, num_ahead: int = 0
) -> InputBatch:
    """Builds the tensors of `plan`, whose changes `table` already has.

    `has_states`: the model has recurrent layers. Tokens are those of the positions `num_ahead` later.
    """
    slots = np.asarray(plan.slots, np.int64)
    num_computed = np.asarray(plan.num_computed, np.int64)
    query_lens = np.asarray(plan.num_scheduled, np.int64)
    num_wanted = np.asarray(plan.num_wanted, np.int64)
    seq_lens = num_computed + query_lens
    ends = np.cumsum(query_lens)
    if len(slots) == ends[-1]:  # one token a row: rows are tokens
        token_slots, positions = slots, num_computed
    else:
        token_slots = np.repeat(slots, query_lens)
        positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, query_lens)

    wanted = np.arange(num_wanted.sum()) + np.repeat(ends - np.cumsum(num_wanted), num_wanted)

    num_pages = -(-int(seq_lens.max()) // table.block_size)
    places = table.places(token_slots, positions + num_ahead)
    mappings = [table.cache_slots(group, token_slots, positions) for group in range(len(table.block_tables))]
    adapters = table.adapters_of(token_slots, positions)
    starts = np.concatenate(([0], ends))
    columns = [places, positions, wanted, slots, num_computed == 0, starts, *mappings]
    there = to_device_together(columns if adapters is None else [*columns, adapters], table.device)
    places_there, positions_there, wanted_there, slots_there, is_new, starts_there, *mappings_there = there[
        : len(columns)
    ]
    pages = [
        GroupPages(mapping, block_tables[slots, :num_pages])
        for mapping, block_tables in zip(mappings_there, table.block_tables, strict=True)
    ]

    return InputBatch(
        token_ids=table.take(places, places_there),
        positions=positions_there,
        pages=pages,
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_wanted=num_wanted,
        wanted_tokens=wanted_there,
        wanted_slots=token_slots[wanted],
        wanted_positions=positions[wanted] + 1,
        rows=state_rows(slots, slots_there, starts, starts_there, num_computed == 0, is_new) if has_states else None,
        prefix_spans=table.spans_of(plan.slots, plan.num_computed),
        adapters=None if adapters is None else there[-1],
    )


def without_padding(rows: torch.Tensor, batch: InputBatch) -> torch.Tensor:
    """Returns those of `rows`, logits or hidden states, that are the step's own."""
    num_rows = len(batch.wanted_slots)
    return rows if batch.shape is None or len(rows) == num_rows else rows[:num_rows]


def state_rows(
    slots: np.ndarray,
    slots_there: torch.Tensor,
    starts: np.ndarray,
    starts_there: torch.Tensor,
    is_new: np.ndarray,
    is_new_there: torch.Tensor,
) -> StateRows:
    """Rows by their values as in `StateRows`, here and there."""
    tables, beginning = slots.astype(np.int32)[:, None], np.flatnonzero(is_new)
    return StateRows(slots_there, torch.from_numpy(starts), is_new_there, tables, beginning, starts_there)
