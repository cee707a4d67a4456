"""The rows of attention over one rank's part of each sequence's positions.

In a row of an attention batch, each token sees one key more than the one before. If each rank holds every n-th
position, that is true for the prompt's tokens at one rank's positions, over the keys of any rank. A prompt then forms
as many rows as there are ranks. If a rank holds runs of several positions, it is true only for the rank's own tokens;
those of other ranks attend one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quire.executor.parallel.context.keys import ShardView
from quire.executor.parallel.context.shard import SequenceShard
from quire.ops.backend import AttentionBatch, Backend
from quire.ops.host_arrays import to_device


class StepPages(Protocol):
    """The places of a step's tokens in the pages of one KV group; see `GroupPages`."""

    @property
    def slot_mapping(self) -> torch.Tensor: ...

    @property
    def block_tables(self) -> np.ndarray: ...


class StepRows(Protocol):
    """The rows of a step; see `InputBatch`."""

    @property
    def query_lens(self) -> np.ndarray: ...

    @property
    def seq_lens(self) -> np.ndarray: ...

    @property
    def positions(self) -> torch.Tensor: ...

    @property
    def pages(self) -> Sequence[StepPages]: ...


@dataclass(frozen=True)
class PartialRows:
    """Rows of tokens that attend to one part.

    Attributes:
        query_lens: [num_rows] int64, on the host.
        num_keys: [num_rows] int64, on the host; the part's keys that a row's last token sees, or 1.
        sequences: [num_rows] int64, on the host; the rows of the step.
        shard_view: of the tokens.
    """

    query_lens: np.ndarray
    num_keys: np.ndarray
    sequences: np.ndarray
    shard_view: ShardView

    @classmethod
    def of(
        cls,
        shard: SequenceShard,
        sequences: np.ndarray,
        positions: np.ndarray,
        device: torch.device,
        order: np.ndarray | None = None,
    ) -> "PartialRows":
        """Forms rows from tokens at `positions` [n] of the step's rows `sequences` [n], in the order of attention.

        Args:
            order: [n] int64; see `ShardView`.
        """
        seen = shard.num_own(positions + 1)
        num_keys = np.maximum(seen, 1)
        is_first = (np.diff(sequences, prepend=-1) != 0) | (np.diff(num_keys, prepend=0) != 1)
        ends = np.append(np.flatnonzero(is_first)[1:], len(sequences))
        longest = int(positions.max()) + 1
        shard_view = ShardView(shard, to_device(positions, device), to_device(seen == 0, device), longest)
        if order is not None:
            shard_view = shard_view._replace(order=to_device(order, device), back=to_device(np.argsort(order), device))
        return cls(np.diff(ends, prepend=0), num_keys[ends - 1], sequences[ends - 1], shard_view)

    @classmethod
    def of_step(cls, shard: SequenceShard, batch: StepRows, query_lens: np.ndarray) -> "PartialRows":
        """Forms rows from the last `query_lens` tokens of each row of a step."""
        sequences, positions = last_tokens(query_lens, batch.seq_lens)
        order = None
        if query_lens.max() > 1:
            order = np.argsort(sequences * shard.size + shard.owner(positions), kind="stable")
            sequences, positions = sequences[order], positions[order]
        return cls.of(shard, sequences, positions, batch.positions.device, order)

    def attention(self, ops: Backend, pages: Sequence[StepPages], block_size: int) -> list[AttentionBatch]:
        """Builds, by KV group, the attention of these rows; stores all tokens of the step.

        Args:
            block_size: slots of a page on this rank.
        """
        return [self.batch(ops, group.slot_mapping, group.block_tables, block_size) for group in pages]

    def batch(
        self, ops: Backend, slot_mapping: torch.Tensor, block_tables: np.ndarray, block_size: int
    ) -> AttentionBatch:
        """Builds the attention of one KV group."""
        return ops.attention_batch(
            self.query_lens, self.num_keys, block_tables[self.sequences], slot_mapping, block_size=block_size
        )  # fmt: skip


def last_tokens(num_last: np.ndarray, seq_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and positions, [sum of `num_last`] int64, of the last `num_last` [num_rows] tokens of each row."""
    ends = np.cumsum(num_last)
    rows = np.repeat(np.arange(len(num_last)), num_last)
    return rows, np.arange(len(rows)) + (seq_lens - ends)[rows]
