"""Heads for requests whose output is the model's hidden states: of each token, or one vector for the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.protocol import NewSlot
from quire.core.wire.row_outputs import HiddenStates, PooledVector, RequestFailure, RowOutput
from quire.executor.sampling.token_table import TokenTable
from quire.executor.step.heads.head import HeadRow, PendingOutput
from quire.executor.transfers import Transfer, Transfers


@dataclass(frozen=True)
class PendingVectors:
    """Hidden states of some tokens, or a pooled vector.

    Attributes:
        start: the position of the first token; None: a pooled vector.
        values: one tensor [num_vectors, hidden] float32.
    """

    row: int
    start: int | None
    values: Transfer

    def read(self) -> RowOutput:
        [vectors] = self.values.values()
        values = vectors.numpy()
        if not np.isfinite(values).all():
            return RequestFailure("internal", "The model's hidden states were NaN or infinite for this request.")
        data = values.astype("<f4", copy=False).tobytes()
        return PooledVector(data) if self.start is None else HiddenStates(self.start, len(values), data)


class TokenVectors:
    """Returns the hidden states of all tokens of a row."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def admit(self, request: NewSlot) -> None:
        """Does nothing: no state is kept."""

    def release(self, slots: list[int]) -> None:
        """Does nothing."""

    def launch(self, rows: Sequence[HeadRow], table: TokenTable) -> list[PendingOutput]:
        return [PendingVectors(row.row, row.start, self._transfers.to_host([row.hidden.float()])) for row in rows]


class _Sum(NamedTuple):
    """The sum of the hidden states of a prompt's first tokens, [hidden] float32."""

    values: Tensor
    num_tokens: int


class Pooler:
    """Computes one vector for each prompt: its last token's hidden state, or the mean of all.

    A prompt's parts are summed up in its slot, from the row at position 0 to the row that ends the prompt.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._sums: dict[int, _Sum] = {}  # by slot, of requests for means

    def admit(self, request: NewSlot) -> None:
        """Begins a new sum if the request is for a mean."""
        self._sums.pop(request.slot, None)
        if request.pooling == "mean":
            self._sums[request.slot] = _Sum(torch.zeros(()), 0)

    def release(self, slots: list[int]) -> None:
        """Drops the sums in these slots, which may be unfinished."""
        for slot in slots:
            self._sums.pop(slot, None)

    def launch(self, rows: Sequence[HeadRow], table: TokenTable) -> list[PendingOutput]:
        results: list[PendingOutput] = []
        for row in rows:
            vector = self._add(row) if row.slot in self._sums else row.hidden[-1].float()
            if row.end == table.num_prompt_tokens[row.slot]:
                results.append(PendingVectors(row.row, None, self._transfers.to_host([vector.unsqueeze(0)])))
        return results

    def _add(self, row: HeadRow) -> Tensor:
        """Adds a row to its slot's sum; returns the mean so far."""
        before = self._sums[row.slot]
        assert before.num_tokens == row.start, "a mean needs all tokens of a prompt, in order"
        values = row.hidden.float().sum(0) if not row.start else before.values + row.hidden.float().sum(0)
        self._sums[row.slot] = _Sum(values, row.end)
        return values / row.end
