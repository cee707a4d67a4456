"""The cached rows of attention layers: keys and values of heads, or latents."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.ops.backend import AttentionForm, Backend
from quire.ops.cache_rows import LARGEST_CODE, decode_parts, gather, row_size, split_rows


class LayerKV(NamedTuple):
    """The keys and values that one layer caches, on one rank."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a token sees, itself included; None: it sees all before it
    sees_prompt: bool = False  # a token of a prompt sees the whole prompt
    is_cross: bool = False  # of what the encoder has read, which a token of the decoder sees whole

    @property
    def size(self) -> int:
        """Elements that the layer caches for a token."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def can_be_quantized(self) -> bool:
        return True

    @property
    def indivisible(self) -> str | None:
        """Names the kind of attention if ranks cannot divide its positions."""
        if self.is_cross:
            return "attention to what an encoder has read"
        return "models whose prompts' tokens see each other" if self.sees_prompt else None

    @property
    def kind(self) -> str:
        """Names the kind in log lines."""
        if self.is_cross:
            return "attention to the encoder"
        if self.sees_prompt:
            return "attention to whole prompts, each computed in one step and none cached for others,"
        return "full attention" if self.window is None else f"windows of {self.window} tokens"

    def cache_shape(self, ops: Backend, num_pages: int, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Returns the shape of the layer's cache.

        Raises:
            ModelLoadError: `dtype` cannot hold this layer.
        """
        try:
            return ops.kv_cache_shape(num_pages, block_size, self.num_kv_heads, self.head_dim, dtype)
        except ValueError as error:
            raise ModelLoadError(f"--kv-cache-dtype: {error}") from None


class LatentKV(NamedTuple):
    """The latents that one layer caches for all heads together, the same on every rank.

    A token has `parts`, each a row of that many elements of `quire.ops.cache_rows`, one after the other. With a `rate`,
    a row is for that number of neighbouring tokens, and lies in the page of the last of them.
    """

    parts: tuple[int, ...]
    window: int | None = None
    rate: int = 1
    sees_prompt: bool = False
    is_cross: bool = False
    can_be_quantized: bool = True  # False: attention does not read them; other rows are computed from the latest few

    @property
    def size(self) -> int:
        """Elements that the layer caches for a token."""
        return sum(self.parts)

    @property
    def indivisible(self) -> str | None:
        """Names the kind of attention if ranks cannot divide its positions."""
        if self.window is None and self.rate == 1:
            return None
        return "attention to rows of several tokens, or to a choice of them"

    @property
    def kind(self) -> str:
        """Names the kind in log lines."""
        if self.rate > 1:
            return f"rows of {self.rate} tokens"
        return "latent attention" if self.window is None else f"latents of {self.window} tokens"

    def cache_shape(self, ops: Backend, num_pages: int, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Returns the shape of the layer's cache.

        Raises:
            ModelLoadError: `dtype` cannot hold this layer, or pages begin inside of rows.
        """
        if block_size % self.rate and self.rate % block_size:
            raise ModelLoadError(
                f"--block-size {block_size}: the model keeps one row for {self.rate} tokens; the block size must be a "
                "multiple of these, or divide them."
            )
        try:
            size = sum(row_size(part, dtype) for part in self.parts)
        except ValueError as error:
            raise ModelLoadError(f"--kv-cache-dtype: {error}") from None
        return (num_pages, max(1, block_size // self.rate), size)

    def store(self, ops: Backend, x: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Stores `x` [num_tokens, size] in `slots` [num_tokens] int64 of the layer's cache."""
        parts = self.parts if pages.dtype in LARGEST_CODE else (self.size,)  # plain rows are one
        for part, rows in zip(x.split(parts, dim=-1), split_rows(pages, parts), strict=True):
            ops.latent.store_rows(part, rows, slots)

    def read(self, pages: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Reads the rows in `slots` [...] int64 of the layer's cache: [..., size] of `dtype`."""
        return decode_parts(gather(pages, slots), self.parts, dtype)


AttentionKV = LayerKV | LatentKV
"""The cached rows of an attention layer."""


def kept_tokens(form: AttentionForm) -> int | None:
    """Returns the most tokens that a token sees, including itself; None: all."""
    return min((limit for limit in (form.window, form.chunk) if limit is not None), default=None)
