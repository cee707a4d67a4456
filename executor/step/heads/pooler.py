"""Heads for requests whose output is vectors: one for each token, or one for the prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.pooling import Pooling
from quire.core.wire.protocol import NewSlot
from quire.core.wire.row_outputs import HiddenStates, PooledVector, RequestFailure, RowOutput
from quire.executor.layers.adapters import Adapters, with_rows_of
from quire.executor.models.vector_heads import VectorHead, plain
from quire.executor.sampling.token_table import TokenTable
from quire.executor.step.heads.head import HeadRow, PendingOutput
from quire.executor.transfers import Transfer, Transfers, to_device


@dataclass(frozen=True)
class PendingVectors:
    """The vectors of some tokens of one row, or the vector of its prompt.

    Attributes:
        start: the position of the first token; None: one vector for the prompt.
        num_tokens: those of the row.
        place: the index of the row's vectors in `values`.
        values: one tensor [num_vectors of several rows, width] float32.
    """

    row: int
    start: int | None
    num_tokens: int
    place: slice
    values: Transfer

    def read(self) -> RowOutput:
        [vectors] = self.values.values()
        values = vectors[self.place].numpy()
        if not np.isfinite(values).all():
            message = "The model's hidden states were NaN or infinite for this request."
            return RequestFailure("internal", message, may_pass=True)
        data = values.astype("<f4", copy=False).tobytes()
        if self.start is None:
            return PooledVector(data)
        return HiddenStates(self.start, self.num_tokens, values.shape[1], data)


class _Request(NamedTuple):
    """A request for the vectors of tokens. `tagged` are the positions of those that it wants; None: all."""

    pooling: Pooling
    tagged: np.ndarray | None


class TokenVectors:
    """Computes the vectors of a row's tokens.

    Args:
        heads: the model's, by name.
        adapters: the place of adapters, of which heads take some, too; None: there is none.
    """

    def __init__(self, heads: Mapping[str, VectorHead], transfers: Transfers, adapters: Adapters | None = None) -> None:
        self._heads = heads
        self._transfers = transfers
        self._adapters = adapters
        self._adapter_of: dict[int, int] = {}  # by slot
        self._requests: dict[int, _Request] = {}  # by slot
        self._unfinished: dict[
            int, Tensor
        ] = {}  # by slot, hidden states [num_tokens, hidden] of a chunk's first tokens

    def admit(self, request: NewSlot) -> None:
        """Notes which tokens the request wants."""
        self.release([request.slot])
        pooling = request.pooling
        self._adapter_of[request.slot] = request.adapter
        if pooling is not None and pooling.method == "all":
            tagged = _tagged(pooling, np.array(request.token_ids[: request.num_prompt_tokens]))
            self._requests[request.slot] = _Request(pooling, tagged)

    def release(self, slots: list[int]) -> None:
        """Forgets the requests in these slots."""
        for slot in slots:
            self._requests.pop(slot, None)
            self._unfinished.pop(slot, None)
            self._adapter_of.pop(slot, None)

    def launch(self, rows: Sequence[HeadRow], table: TokenTable) -> list[PendingOutput]:
        return [self._launch(row, table) for row in rows]

    def _launch(self, row: HeadRow, table: TokenTable) -> PendingOutput:
        pooling, tagged = self._requests[row.slot]
        hidden = row.hidden
        if tagged is not None:
            inside = tagged[(tagged >= row.start) & (tagged < row.end)] - row.start
            hidden = hidden[to_device(inside, hidden.device)]
        elif pooling.chunk_size is not None:
            hidden = self._chunks(row, pooling.chunk_size, is_last=row.end == table.num_prompt_tokens[row.slot])
        adapter = self._adapter_of[row.slot]
        with with_rows_of(self._adapters, [adapter] * len(hidden)):
            values = _through(self._heads, hidden.float(), pooling)
        if pooling.text is not None:
            assert len(row.hidden) == table.num_prompt_tokens[row.slot], "an encoder computes a text at once"
            with with_rows_of(self._adapters, [adapter]):
                vector = _through(self._heads, _of_whole(row.hidden, pooling.text).unsqueeze(0), pooling.text)
            values = torch.cat([vector.flatten(), values.flatten()]).unsqueeze(1)
        transfer = self._transfers.to_host([values])
        return PendingVectors(row.row, row.start, row.end - row.start, slice(None), transfer)

    def _chunks(self, row: HeadRow, size: int, *, is_last: bool) -> Tensor:
        """Returns the means of the chunks that end in this row, and keeps the states of a chunk that goes on."""
        states = row.hidden.float()
        if row.start % size:
            states = torch.cat([self._unfinished[row.slot], states])
        num_whole = len(states) if is_last else len(states) // size * size
        self._unfinished[row.slot] = states[num_whole:]
        means = [chunk.mean(0) for chunk in states[:num_whole].split(min(size, max(num_whole, 1)))]
        return torch.stack(means) if num_whole else states[:0]


def _of_whole(hidden: Tensor, pooling: Pooling) -> Tensor:
    """Returns the vector [hidden] float32 of a whole prompt, whose tokens have the states [num_tokens, hidden]."""
    match pooling.method:
        case "mean":
            return hidden[pooling.num_lead_tokens :].float().sum(0) / max(len(hidden) - pooling.num_lead_tokens, 1)
        case "cls":
            return hidden[0].float()
        case "last":
            return hidden[-1].float()
        case _:
            raise AssertionError(f"{pooling.method} makes no vector beside those of tokens")


def _tagged(pooling: Pooling, prompt: np.ndarray) -> np.ndarray | None:
    """Returns the positions of the tokens of `prompt` that get vectors; None: all do."""
    if pooling.step_tag_id is not None:
        return np.flatnonzero(prompt == pooling.step_tag_id)
    if pooling.tag_ids:
        return np.flatnonzero(np.isin(prompt, pooling.tag_ids))
    if pooling.chunk_size is not None:
        return None
    start = int(prompt[0] == pooling.without_first)
    stop = len(prompt) - int(prompt[-1] == pooling.without_last)
    return None if (start, stop) == (0, len(prompt)) else np.arange(start, max(start, stop))


_MAX_SCORES = 2**23
"""The most scores of the vocabulary at once."""


class _Sum(NamedTuple):
    """The sum of the hidden states of a prompt's first tokens, [hidden] float32."""

    values: Tensor
    num_tokens: int


class Pooler:
    """Computes one vector for each prompt, from the hidden state of its first or last token, from the mean of all, or
    from their scores of the vocabulary.

    The state that a prompt's parts share is kept in its slot, from the row at position 0 to the row that ends the
    prompt: the sum of its hidden states, the first one, or the weights of the vocabulary.

    Args:
        heads: the model's, by name.
        compute_logits: maps hidden states [n, hidden] of the step's tokens, from an index on, to scores
            [n, vocab_size].
        adapters: as for `TokenVectors`.
    """

    def __init__(
        self,
        heads: Mapping[str, VectorHead],
        transfers: Transfers,
        compute_logits: Callable[[Tensor, int], Tensor],
        vocab_size: int,
        adapters: Adapters | None = None,
    ) -> None:
        self._heads = heads
        self._transfers = transfers
        self._adapters = adapters
        self._adapter_of: dict[int, int] = {}  # by slot
        self._compute_logits = compute_logits
        self._tokens_at_once = max(1, _MAX_SCORES // vocab_size)
        self._weights: dict[int, Tensor] = {}  # by slot, [vocab_size] float32
        self._poolings: dict[int, Pooling] = {}  # by slot
        self._sums: dict[int, _Sum] = {}  # by slot, of requests for means
        self._firsts: dict[int, Tensor] = {}  # by slot, the first token's state [hidden] float32

    def admit(self, request: NewSlot) -> None:
        """Notes what the request wants, and begins anew."""
        self.release([request.slot])
        self._adapter_of[request.slot] = request.adapter
        if request.pooling is not None:
            self._poolings[request.slot] = request.pooling

    def release(self, slots: list[int]) -> None:
        """Forgets the requests in these slots, which may be unfinished."""
        for slot in slots:
            for kept in (self._poolings, self._sums, self._firsts, self._weights, self._adapter_of):
                kept.pop(slot, None)

    def launch(self, rows: Sequence[HeadRow], table: TokenTable) -> list[PendingOutput]:
        # Rows with the same parameters go through a head, and to the host, together.
        groups: list[tuple[Pooling, list[HeadRow], list[Tensor]]] = []
        for row in rows:
            pooling = self._poolings[row.slot]
            vector = self._add(row, pooling)
            if row.end != table.num_prompt_tokens[row.slot]:
                continue
            group = next((group for group in groups if group[0] == pooling), None)
            if group is None:
                groups.append(group := (pooling, [], []))
            group[1].append(row)
            group[2].append(vector)
        results: list[PendingOutput] = []
        for pooling, ended, vectors in groups:
            with with_rows_of(self._adapters, [self._adapter_of[row.slot] for row in ended]):
                made = _through(self._heads, torch.stack(vectors), pooling)
            values = self._transfers.to_host([made])
            results += [PendingVectors(row.row, None, 1, slice(at, at + 1), values) for at, row in enumerate(ended)]
        return results

    def _add(self, row: HeadRow, pooling: Pooling) -> Tensor:
        """Takes in a row; returns the vector of the prompt up to its end."""
        match pooling.method:
            case "mean":
                return self._add_to_sum(row, pooling.num_lead_tokens)
            case "cls":
                if not row.start:
                    self._firsts[row.slot] = row.hidden[0].float()
                return self._firsts[row.slot]
            case "splade_max":
                return self._add_weights(row, lambda weights: weights.amax(0))
            case "splade_sum":
                return self._add_weights(row, lambda weights: weights.sum(0))
            case _:
                return row.hidden[-1].float()

    def _add_weights(self, row: HeadRow, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the weights of the vocabulary, those of tokens [n, vocab_size] reduced to [vocab_size]."""
        found = [self._weights[row.slot]] if row.start else []
        for start in range(0, len(row.hidden), self._tokens_at_once):
            scores = self._compute_logits(row.hidden[start : start + self._tokens_at_once], row.first + start)
            found.append(reduce(torch.log1p(torch.relu(scores.float()))))
        self._weights[row.slot] = weights = reduce(torch.stack(found))
        return weights

    def _add_to_sum(self, row: HeadRow, num_lead_tokens: int) -> Tensor:
        values = row.hidden[max(num_lead_tokens - row.start, 0) :].float().sum(0)
        if row.start:
            before = self._sums[row.slot]
            assert before.num_tokens == row.start, "a mean needs all tokens of a prompt, in order"
            values = before.values + values
        self._sums[row.slot] = _Sum(values, row.end)
        return values / max(row.end - num_lead_tokens, 1)


def _through(heads: Mapping[str, VectorHead], hidden: Tensor, pooling: Pooling) -> Tensor:
    """Computes the output for vectors [n, hidden] float32."""
    head = plain if pooling.head is None else heads[pooling.head]
    values = head(hidden, pooling)
    return values if pooling.columns is None else values[:, pooling.columns]
