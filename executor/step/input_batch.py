"""Builds the flat tensors of a forward pass from a step plan and the request table.

All rows of a step lie one after another in each tensor; NumPy computes indices over whole columns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from quire.core.wire.protocol import StepPlan
from quire.executor.step.request_table import RequestTable
from quire.executor.transfers import to_device
from quire.ops.recurrent import StateRows


class GroupPages(NamedTuple):
    """The places of one step's tokens in the pages of one KV group.

    Attributes:
        slot_mapping: [num_tokens] int64, on the device; place of a token's key and value, page * block_size + offset.
        block_tables: [num_rows, most pages of a row] int32, on the host. Entries past a row's own pages, and before the
            pages that its tokens see, may be any ids.
    """

    slot_mapping: torch.Tensor
    block_tables: np.ndarray


@dataclass(frozen=True)
class InputBatch:
    """One step's input. `num_tokens` is the sum of the rows' query lengths.

    Attributes:
        token_ids: [num_tokens] int64, on the device.
        positions: [num_tokens] int64, on the device; place in the request's sequence.
        pages: by KV group.
        query_lens: [num_rows] int64, on the host; tokens computed in this step.
        seq_lens: [num_rows] int64, on the host; tokens in the cache once this step has run.
        num_wanted: [num_rows] int64, on the host; see `StepPlan`.
        wanted_tokens: [their sum] int64, on the device; flat indices of the tokens at which logits are wanted.
        wanted_slots: like `wanted_tokens`, on the host.
        wanted_positions: like `wanted_tokens`, on the host; the position that the token sampled there will take.
        rows: the rows for recurrent layers; None for a model without.
        prompt_lens: [num_rows] int64, on the host; tokens of each row's prompt. None: no token of the step is followed
            by one of its own prompt.
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
    prompt_lens: np.ndarray | None = None


def build_input_batch(plan: StepPlan, table: RequestTable, *, has_states: bool = False) -> InputBatch:
    """Builds the tensors of `plan`, whose changes `table` already has.

    `has_states`: the model has recurrent layers.
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

    def on_device(array: np.ndarray) -> torch.Tensor:
        return to_device(array, table.device)

    size = table.block_size
    num_pages = -(-int(seq_lens.max()) // size)
    pages = [
        GroupPages(
            on_device(table.cache_slots(group, token_slots, positions)),
            block_tables[slots, :num_pages],
        )
        for group, block_tables in enumerate(table.block_tables)
    ]

    return InputBatch(
        token_ids=table.gather(token_slots, positions),
        positions=on_device(positions),
        pages=pages,
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_wanted=num_wanted,
        wanted_tokens=on_device(wanted),
        wanted_slots=token_slots[wanted],
        wanted_positions=positions[wanted] + 1,
        rows=state_rows(on_device(slots), ends, num_computed) if has_states else None,
        prompt_lens=table.num_prompt_tokens[slots].astype(np.int64),
    )


def state_rows(slots: torch.Tensor, ends: np.ndarray, num_computed: np.ndarray) -> StateRows:
    """Returns rows in `slots` [num_rows] int64, on the device, whose tokens end before `ends` [num_rows]."""
    starts = np.concatenate(([0], ends))
    return StateRows(slots, torch.from_numpy(starts), torch.from_numpy(num_computed == 0))
