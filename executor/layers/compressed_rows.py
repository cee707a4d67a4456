"""Rows that stand for runs of tokens, as DeepSeek V4 keeps them: where they lie in pages, and how they are made."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.ops.backend import AttentionBatch
from quire.ops.latent import CacheRows

_SLOTS = 1 << 20
"""The most slots that are made at once, unless a single token sees more rows."""


class RowPlaces:
    """Where the tokens of a step find rows of their sequences, in the pages of one KV group."""

    def __init__(self, batch: AttentionBatch, positions: Tensor) -> None:
        """`positions` are the step's, [num_tokens] int64."""
        device = positions.device
        rows = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
        starts = batch.seq_lens - batch.query_lens
        firsts = np.repeat(np.cumsum(batch.query_lens) - batch.query_lens, batch.query_lens)
        self._host_positions = np.arange(len(rows)) - firsts + starts[rows]
        self._longest = int(batch.seq_lens.max(initial=0))
        self._rows = torch.from_numpy(rows).to(device)
        self._table = torch.from_numpy(batch.block_tables.astype(np.int64)).to(device)
        self._block_size = batch.block_size
        self._positions = positions

    def latest(self, cache: Tensor, window: int) -> CacheRows:
        """A row for each of the last `window` tokens, each token's own the last."""
        first = (self._positions + 1 - window).clamp_min(0)
        positions = first.unsqueeze(1) + torch.arange(window, device=first.device)
        slots = self._slots(self._rows, torch.minimum(positions, self._positions.unsqueeze(1)), 1)
        return CacheRows(cache, slots.int(), self._positions + 1 - first)

    def complete(self, cache: Tensor, rate: int) -> CacheRows:
        """All rows of `rate` tokens that were complete with the token itself or before it."""
        ends = torch.arange(self._longest // rate, device=self._positions.device) * rate + rate - 1
        positions = torch.minimum(ends, self._positions.unsqueeze(1))
        slots = self._slots(self._rows, positions, rate)
        return CacheRows(cache, slots.int(), (self._positions + 1) // rate)

    def completing(self, rate: int) -> Tensor:
        """The step's tokens that complete a row of `rate` tokens: indices [n] int64."""
        [tokens] = np.nonzero((self._host_positions + 1) % rate == 0)
        return torch.from_numpy(tokens).to(self._positions.device)

    def at(self, positions: Tensor) -> Tensor:
        """Slots of the tokens at `positions` [num_tokens, count], each in the token's own sequence."""
        return self._slots(self._rows, positions, 1)

    def before(self, tokens: Tensor, count: int) -> Tensor:
        """Slots of the last `count` tokens up to each of `tokens`: [n, count]; before a sequence, its first one's."""
        positions = self._positions[tokens].unsqueeze(1) + torch.arange(1 - count, 1, device=tokens.device)
        return self._slots(self._rows[tokens], positions.clamp_min(0), 1)

    def own(self, tokens: Tensor, rate: int) -> Tensor:
        """Slots of the rows that `tokens` complete: [n]."""
        return self._slots(self._rows[tokens], self._positions[tokens].unsqueeze(1), rate).squeeze(1)

    def parts(self, rate: int | None, count: int = 0) -> Iterator[slice]:
        """All tokens, so few at a time that `complete` takes little memory; at once, if there is no `rate`.

        Nor does `at` take much for `count` positions of each.
        """
        num_rows = 0 if rate is None else self._longest // rate
        size = max(1, _SLOTS // max(1, num_rows, count))
        for begin in range(0, len(self._rows), size):
            yield slice(begin, begin + size)

    def of(self, tokens: Tensor | slice) -> "RowPlaces":
        """The places as some of the step's tokens see them."""
        some = object.__new__(RowPlaces)
        vars(some).update(vars(self), _rows=self._rows[tokens], _positions=self._positions[tokens])
        return some

    def _slots(self, rows: Tensor, positions: Tensor, rate: int) -> Tensor:
        """Slots of the rows of `rate` tokens in which those at `positions` [n, count] of the sequences `rows` are."""
        size = self._block_size
        pages = self._table[rows.unsqueeze(1), positions // size]
        return pages * max(1, size // rate) + positions % size // rate


class StepPlaces:
    """The `RowPlaces` of a step, by cache. Those of a KV group are made once."""

    def __init__(self, step: StepContext) -> None:
        self._step = step
        self._found: dict[int, RowPlaces] = {}

    def of(self, number: int) -> RowPlaces:
        """Those in the group of the cache with this number."""
        group = self._step.caches[number].group
        if group not in self._found:
            self._found[group] = RowPlaces(self._step.attention[group], self._step.positions)
        return self._found[group]


class Compressor:
    """Makes a row of `rate` tokens: the sum of what each gives, each number with shares of its own (a softmax).

    A token gives `source_size` numbers: what is summed, and the logits of its shares. If rows overlap, it gives both
    twice, once for the row after its own. Rows are normalized, and their last numbers rotated in neighbouring pairs to
    the position of their first token.
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
        """`size` is that of a row."""
        self.size = size
        self._rate = rate
        self._overlaps = overlaps
        self._rotary = rotary
        width = 2 * size if overlaps else size
        self.source_size = 2 * width
        self.num_tokens = 2 * rate if overlaps else rate
        """Tokens of which a row is made."""
        self._bias = context.read(f"{name}.ape", (rate, width), dtype=torch.float32)
        self._norm = RMSNorm(context, f"{name}.norm", size, style)

    def __call__(self, sources: Tensor, positions: Tensor) -> Tensor:
        """`sources` [n, num_tokens, source_size] of the tokens up to `positions` [n] → rows [n, size]."""
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
    """`x` [num_tokens, heads, size] with its last numbers rotated in neighbouring pairs, or back.

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
