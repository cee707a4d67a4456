"""Compressed rows of several tokens, as in DeepSeek V4: their places in pages, and their computation."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.ops.backend import AttentionBatch
from quire.ops.latent import CacheRows

_SLOTS = 1 << 20
"""The most slots that are computed at once, unless a single token sees more rows."""


class RowPlaces:
    """The places of sequences' rows in the pages of one KV group, for the tokens of a step."""

    def __init__(self, batch: AttentionBatch, positions: Tensor) -> None:
        """Takes the step's `positions`, [num_tokens] int64."""
        self._here = batch.positions
        if self._here is None:
            self._rows = torch.arange(len(positions), device=positions.device)
        else:
            rows = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
            self._rows = torch.from_numpy(rows).to(positions.device)
        self._longest = batch.max_seq_len
        self._table = batch.tables_there
        self._block_size = batch.block_size
        self._positions = positions

    def latest(self, cache: Tensor, window: int) -> CacheRows:
        """Returns a row for each of the last `window` tokens, each token's own as the last."""
        first = (self._positions + 1 - window).clamp_min(0)
        positions = first.unsqueeze(1) + torch.arange(window, device=first.device)
        slots = self._slots(self._rows, torch.minimum(positions, self._positions.unsqueeze(1)), 1)
        return CacheRows(cache, slots.int(), self._positions + 1 - first)

    def complete(self, cache: Tensor, rate: int) -> CacheRows:
        """Returns all rows of `rate` tokens that were complete with the token itself or before it."""
        num_rows = max(self._here is None, self._longest // rate)  # a bound may be less than a row
        ends = torch.arange(num_rows, device=self._positions.device) * rate + rate - 1
        positions = torch.minimum(ends, self._positions.unsqueeze(1))
        slots = self._slots(self._rows, positions, rate)
        return CacheRows(cache, slots.int(), (self._positions + 1) // rate)

    def completing(self, rate: int) -> Tensor:
        """Lists the step's tokens that complete a row of `rate` tokens: indices [n] int64.

        Where only the device knows positions, these are all tokens. A row that is not complete may be stored in the
        place of `own`: it is not seen, and the complete row replaces it.
        """
        if self._here is None:
            return self._rows
        [tokens] = np.nonzero((self._here + 1) % rate == 0)
        return torch.from_numpy(tokens).to(self._positions.device)

    def at(self, positions: Tensor) -> Tensor:
        """Returns slots of the tokens at `positions` [num_tokens, count], in each token's sequence."""
        return self._slots(self._rows, positions, 1)

    def before(self, tokens: Tensor, count: int) -> Tensor:
        """Returns slots of the last `count` tokens up to each of `tokens`: [n, count]. Those before the sequence are
        its first's.
        """
        positions = self._positions[tokens].unsqueeze(1) + torch.arange(1 - count, 1, device=tokens.device)
        return self._slots(self._rows[tokens], positions.clamp_min(0), 1)

    def own(self, tokens: Tensor, rate: int) -> Tensor:
        """Returns slots of the rows that `tokens` complete: [n]."""
        return self._slots(self._rows[tokens], self._positions[tokens].unsqueeze(1), rate).squeeze(1)

    def parts(self, rate: int | None, count: int = 0) -> Iterator[slice]:
        """Yields all tokens, in parts so small that `complete` takes little memory; all at once without a `rate`.

        The parts are also small enough for `at` with `count` positions of each token.
        """
        num_rows = 0 if rate is None else self._longest // rate
        size = max(1, _SLOTS // max(1, num_rows, count))
        for begin in range(0, len(self._rows), size):
            yield slice(begin, begin + size)

    def of(self, tokens: Tensor | slice) -> "RowPlaces":
        """Returns the places for some of the step's tokens."""
        some = object.__new__(RowPlaces)
        vars(some).update(vars(self), _rows=self._rows[tokens], _positions=self._positions[tokens])
        return some

    def _slots(self, rows: Tensor, positions: Tensor, rate: int) -> Tensor:
        """Returns slots of the rows of `rate` tokens that contain `positions` [n, count] of the sequences `rows`."""
        size = self._block_size
        pages = self._table[rows.unsqueeze(1), positions // size].long()
        return pages * max(1, size // rate) + positions % size // rate


class StepPlaces:
    """The `RowPlaces` of a step, by cache. Each KV group's are computed once."""

    def __init__(self, step: StepContext) -> None:
        self._step = step
        self._found: dict[int, RowPlaces] = {}

    def of(self, number: int) -> RowPlaces:
        """Returns those in the group of the cache with this number."""
        group = self._step.caches[number].group
        if group not in self._found:
            self._found[group] = RowPlaces(self._step.attention[group], self._step.positions)
        return self._found[group]


class Compressor:
    """Computes a row from `rate` tokens: their sum, weighted by a softmax over tokens for each element.

    A token has `source_size` inputs: the values to sum, and the logits of the weights. If rows overlap, it has both
    twice, the second time for the row after its own. Rows are normalized, and their last elements rotated in
    neighbouring pairs to the position of their first token.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        size: int,
        rate: int,
        rotary: RotaryEmbedding,
        style: NormStyle,
        *,
        overlaps: bool,
    ) -> None:
        """Takes the `size` of a row."""
        self.size = size
        self._rate = rate
        self._overlaps = overlaps
        self._rotary = rotary
        width = 2 * size if overlaps else size
        self.source_size = 2 * width
        self.num_tokens = 2 * rate if overlaps else rate
        """The tokens from which a row is computed."""
        self._bias = context.read(f"{name}.ape", (rate, width), dtype=torch.float32)
        self._norm = RMSNorm(context, f"{name}.norm", size, style)

    def __call__(self, sources: Tensor, positions: Tensor) -> Tensor:
        """Maps `sources` [n, num_tokens, source_size] of the tokens up to `positions` [n] to rows [n, size]."""
        given, logits = sources.float().chunk(2, dim=-1)
        size, rate = self.size, self._rate
        if self._overlaps:
            given = torch.cat((given[:, :rate, :size], given[:, rate:, size:]), dim=1)
            logits = torch.cat(
                (logits[:, :rate, :size] + self._bias[:, :size], logits[:, rate:, size:] + self._bias[:, size:]), dim=1
            )
            is_first = (positions < rate).view(-1, 1, 1)  # there is no row before this one
            logits[:, :rate].masked_fill_(is_first, float("-inf"))
        else:
            logits = logits + self._bias
        rows = self._norm((given * logits.softmax(dim=1)).sum(dim=1).to(sources.dtype))
        return rotate_last(rows.unsqueeze(1), *self._rotary(positions + 1 - rate)).squeeze(1)


def rotate_last(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotates the last elements of `x` [num_tokens, heads, size] in neighbouring pairs, or back.

    `cos` and `sin` are as for `Backend.rotary`.
    """
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].float(), sin[..., half:].float()
    if back:
        sin = -sin
    plain, turned = x.split((x.shape[-1] - 2 * half, 2 * half), dim=-1)
    even, odd = turned.float().unflatten(-1, (half, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), dim=-1)
