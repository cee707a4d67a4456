"""Reads the tokens that a token sees off Transformers' mask functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps (batch index, head, query position, key position), all scalars, to True if the query sees the key."""

_FAR = 1 << 24
"""A position past every window."""


class Visible(NamedTuple):
    """The tokens that a token sees; see `AttentionForm`. With `is_bidirectional`, the window is on both sides."""

    window: int | None = None
    chunk: int | None = None
    is_bidirectional: bool = False

    def mask(self, num_tokens: int) -> Tensor:
        """Builds the mask of one sequence, [num_tokens, num_tokens] bool: True where a token sees another or itself."""
        keys = torch.arange(num_tokens)
        queries = keys.unsqueeze(1)
        seen = keys <= queries
        if self.is_bidirectional:
            seen = torch.ones_like(seen) if self.window is None else (keys - queries).abs() < self.window
        elif self.window is not None:
            seen &= keys > queries - self.window
        if self.chunk is not None:
            seen &= keys // self.chunk == queries // self.chunk
        return seen


@dataclass(frozen=True)
class MaskBuilder:
    """Builds the bias of scores: 0 where a token is seen, else the dtype's minimum; [1, 1, num_tokens, num_tokens]."""

    visible: Visible
    device: torch.device

    def __call__(self, num_tokens: int) -> Tensor:
        hidden = ~self.visible.mask(num_tokens).to(self.device)
        scores = torch.zeros(1, 1, num_tokens, num_tokens, device=self.device)
        return scores.masked_fill_(hidden, torch.finfo(torch.float32).min)


class Mask(Tensor):
    """A mask that carries its meaning. Tensors derived from it lose that, except slices."""

    visible: Visible | None = None

    def __getitem__(self, index: Any) -> Tensor:
        part = super().__getitem__(index).as_subclass(Mask)
        part.visible = self.visible
        return part

    @classmethod
    def build(
        cls, batch_size: int, q_length: int, kv_length: int, *_: Any, mask_function: MaskFunction, **__: Any
    ) -> "Mask":
        """Builds a mask, as `AttentionMaskInterface` wants it."""
        mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool).tril().as_subclass(cls)
        try:
            mask.visible = read_mask(mask_function)
        except (IndexError, RuntimeError):  # a function that indexes tensors of the tokens at hand
            mask.visible = None
        return mask


def read_mask(function: MaskFunction) -> Visible | None:
    """Finds the meaning of a mask function by asking it about tokens far from the start.

    None: a query sees other numbers of earlier tokens than of later ones.
    """

    zero = torch.tensor(0)

    def sees(query: int, key: int) -> bool:
        return bool(function(zero, zero, torch.tensor(query), torch.tensor(key)))

    def first_seen(query: int) -> int:
        """Finds the first key that `query` sees. The query sees all keys from there on."""
        low, high = 0, query
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sees(query, middle) else (middle + 1, high)
        return low

    def last_seen(query: int) -> int:
        """Finds the last key that `query` sees. The query sees all keys up to there."""
        low, high = query, 2 * query
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if sees(query, middle) else (low, middle - 1)
        return low

    first = first_seen(_FAR)
    if (after := last_seen(_FAR) - _FAR) > 0:
        is_even = first == _FAR - after
        return Visible(None if after == _FAR else after + 1, is_bidirectional=True) if is_even else None
    if first == 0:
        return Visible()
    if first_seen(_FAR + 1) == first + 1:
        return Visible(window=_FAR - first + 1)
    low, high = first, _FAR + 1  # a chunk ends before the first query that does not see `first`
    while first_seen(high) == first:
        high += high - first
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if first_seen(middle) == first else (low, middle)
    return Visible(chunk=high - first)
