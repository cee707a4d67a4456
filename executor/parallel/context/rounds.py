"""The pairs of ranks' tokens and keys in a step whose tokens are divided, while either travels around a ring.

Most steps need none of them, and each layer of the others needs one of two kinds. So rows and batches are computed on
demand, and cached for the step's other layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.executor.parallel.context.keys import PartialKeys
from quire.executor.parallel.context.rows import PartialRows, StepRows
from quire.executor.parallel.context.shard import SequenceShard
from quire.ops.backend import AttentionBatch, Backend
from quire.ops.host_arrays import to_device


class SharedTokens(NamedTuple):
    """The tokens of each part of the ranks; all [num_parts, n] int64.

    Attributes:
        sequences: rows of the step.
        positions: of the tokens in their sequences.
    """

    sequences: np.ndarray
    positions: np.ndarray


class RingRounds:
    """The `Rounds` of one step.

    Args:
        batch: the step's; it stores this rank's tokens.
        tokens: those that attend.
        shard: this rank's part of the positions.
        num_same: ranks that compute the same tokens.
        windows: by KV group, the most tokens that a token sees, including itself; None: all before it.
        block_size: slots of a page on a rank.
    """

    def __init__(
        self,
        ops: Backend,
        batch: StepRows,
        tokens: SharedTokens,
        shard: SequenceShard,
        num_same: int,
        windows: Sequence[int | None],
        block_size: int,
    ) -> None:
        self._ops = ops
        self._batch = batch
        self._tokens = tokens
        self._shard = shard
        self._num_same = num_same
        self._windows = windows
        self._block_size = block_size
        self._rows: dict[tuple[int, int], PartialRows] = {}  # by the part of the tokens, and the rank of the keys
        self._of_queries: dict[tuple[int, int], AttentionBatch] = {}  # by the part of the tokens, and KV group
        self._of_keys: dict[tuple[int, int], AttentionBatch] = {}  # by the rank of the keys, and KV group
        self._page_ids: dict[int, tuple[np.ndarray, torch.Tensor]] = {}  # by KV group; ascending

    def of_queries(self, rank: int, keys: PartialKeys) -> PartialKeys:
        part, group = rank // self._num_same, keys.group
        rows = self._rows_of(part, self._shard.rank)
        if (part, group) not in self._of_queries:
            pages = self._batch.pages[group]
            self._of_queries[part, group] = rows.batch(
                self._ops, pages.slot_mapping, pages.block_tables, self._block_size
            )  # fmt: skip
        return keys._replace(batch=self._of_queries[part, group], shard_view=rows.shard_view)

    def of_keys(self, rank: int, block: torch.Tensor, keys: PartialKeys) -> PartialKeys:
        group = keys.group
        rows = self._rows_of(self._shard.rank // self._num_same, rank)
        if (rank, group) not in self._of_keys:
            slot_mapping = self._batch.pages[group].slot_mapping
            self._of_keys[rank, group] = rows.batch(self._ops, slot_mapping, self._in_block(group), self._block_size)
        return PartialKeys(block, self._of_keys[rank, group], rows.shard_view, group)

    def page_ids(self, group: int) -> torch.Tensor:
        return self._seen_pages(group)[1]

    def _seen_pages(self, group: int) -> tuple[np.ndarray, torch.Tensor]:
        """Returns the pages that tokens of the step see, on host and device. All ranks have the same pages."""
        if group not in self._page_ids:
            batch, window = self._batch, self._windows[group]
            size = self._block_size * self._shard.size  # tokens of a page
            begins = np.zeros_like(batch.seq_lens)
            if window is not None:
                begins = (batch.seq_lens - batch.query_lens - window + 1).clip(0)
            tables = batch.pages[group].block_tables
            first_tokens = np.arange(tables.shape[1]) * size
            is_seen = (first_tokens > begins[:, None] - size) & (first_tokens < batch.seq_lens[:, None])
            page_ids = np.unique(tables[is_seen])
            self._page_ids[group] = page_ids, to_device(page_ids.astype(np.int64), batch.positions.device)
        return self._page_ids[group]

    def _in_block(self, group: int) -> np.ndarray:
        """Returns the step's block tables as indices into a block of the pages that its tokens see."""
        page_ids, _ = self._seen_pages(group)
        places = np.searchsorted(page_ids, self._batch.pages[group].block_tables)
        return places.clip(max=len(page_ids) - 1).astype(np.int32)  # arbitrary for others

    def _rows_of(self, part: int, rank: int) -> PartialRows:
        if (part, rank) not in self._rows:
            self._rows[part, rank] = PartialRows.of(
                self._shard._replace(rank=rank), self._tokens.sequences[part], self._tokens.positions[part],
                self._batch.positions.device,
            )  # fmt: skip
        return self._rows[part, rank]
