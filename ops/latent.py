"""The operations of multi-head latent attention (arXiv:2405.04434): all heads share one key a token.

That key is [latent | rotated key]; its latent, of `rank` numbers, is the value, too. A layer's cache is
[num_pages, block_size, row_size(rank) + row_size(rotary_dim)], and its pages and what they keep of a token may lie
apart. In a cache of few bits, latent and rotated key are rows of codes with a scale each (`quire.ops.cache_rows`),
because the rotated key is not normalized and may be many times as large.

In sparse attention (arXiv:2512.02556, section 2.1) a token has an index key besides, a row in a cache of its own.
Index queries choose the tokens that attention sees. In compressed attention, a row may stand for several tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

Batch = TypeVar("Batch")
"""See `quire.ops.backend.Batch`."""


class Selection(NamedTuple):
    """The tokens that each token of a step attends to, in the order of their positions.

    Attributes:
        slots: [num_tokens, top_k] int32; the first `counts` of a row are places in the layer's pages, as those of
            `AttentionBatch.slot_mapping`.
        counts: [num_tokens] int64; at least 1.
    """

    slots: Tensor
    counts: Tensor


class CacheRows(NamedTuple):
    """Rows of one cache that each token of a step may see.

    Attributes:
        cache: [num_pages, rows of a page, row_size(size)].
        slots: [num_tokens, most] int32; the first `counts` of a row are places in the cache, page * rows of a page +
            row; those after them are places, too, and not seen.
        counts: [num_tokens] int64, from 0 to `most`.
    """

    cache: Tensor
    slots: Tensor
    counts: Tensor


class LatentOperations(ABC, Generic[Batch]):
    """The operations of latent attention on one kind of device."""

    @abstractmethod
    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """A linear layer for each head: `x` [num_tokens, heads, in] times `weight` [heads, in, out], of one dtype.

        Returns [num_tokens, heads, out].
        """

    @abstractmethod
    def rotate_and_store_latent(
        self,
        q: Tensor,
        latent: Tensor,
        norm: tuple[Tensor, float],
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
        *,
        is_interleaved: bool,
    ) -> Tensor:
        """The operations between the projections and the attention.

        `q` [num_tokens, heads, rotary_dim] is the part of the queries that is rotated. `latent` [num_tokens, rank +
        rotary_dim] is the projection to be stored: the latents, which are normalized by `norm` (weight [rank], eps),
        and keys, which are rotated like the queries. They are stored in the slots of `slot_mapping` [num_tokens] int64
        as finite numbers (see `Backend.write_kv`). Returns the rotated queries, dense.

        `cos` and `sin` are as for `Backend.rotary`; without dimensions, nothing is rotated. If `is_interleaved`, pairs
        are (2i, 2i + 1) and come out as (i, i + rotary_dim / 2), of queries and keys alike, which leaves their products
        as they are.
        """

    @abstractmethod
    def store_rows(self, x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Stores `x` [num_tokens, size] in the slots of `slot_mapping` [num_tokens] int64 as finite numbers.

        `cache` is [num_pages, block_size, row_size(size)].
        """

    @abstractmethod
    def select_tokens(
        self, q: Tensor, weights: Tensor, cache: Tensor, batch: Batch, *, top_k: int, scale: float
    ) -> Selection:
        """The `top_k` tokens of the highest scores, of a token and those before it; all if they are not more.

        The score of a key is the sum over heads of `weight * relu(scale * q·key)`, in float32; of equal scores, the
        earlier token is taken. `q` [num_tokens, heads, size] and `weights` [num_tokens, heads] are of one dtype;
        `cache` [num_pages, block_size, row_size(size)] has the keys, those of the step's new tokens included.
        """

    def select_rows(self, q: Tensor, weights: Tensor, rows: CacheRows, *, top_k: int, scale: float) -> CacheRows:
        """The rows that `best_rows` finds."""
        if rows.slots.shape[1] <= top_k:
            return rows
        best = self.best_rows(q, weights, rows, top_k=top_k, scale=scale)
        return CacheRows(rows.cache, rows.slots.gather(1, best), rows.counts.clamp_max(top_k))

    @abstractmethod
    def best_rows(self, q: Tensor, weights: Tensor, rows: CacheRows, *, top_k: int, scale: float) -> Tensor:
        """The `top_k` rows of the highest scores, of those that a token may see, in their order; all if not more.

        `rows` have the index keys. Scores, `q` and `weights` are as for `select_tokens`. Returns columns of
        `rows.slots`, [num_tokens, at most top_k] int64. Past a token's count they are any.
        """

    @abstractmethod
    def attend_rows(self, q: Tensor, rows: Sequence[CacheRows], sinks: Tensor, *, scale: float) -> Tensor:
        """Attention of each token to all rows that it may see: a row is the key of all heads, and their value.

        `q` is [num_tokens, heads, size]; `sinks` [heads] float32 are as for `AttentionForm`. Returns the shape of `q`.
        """

    @abstractmethod
    def latent_attention(
        self,
        q: Tensor,
        q_rotated: Tensor,
        cache: Tensor,
        batch: Batch,
        *,
        scale: float,
        selection: Selection | None = None,
    ) -> Tensor:
        """Causal attention in the latent space.

        `q` [num_tokens, heads, rank] and `q_rotated` [num_tokens, heads, rotary_dim], of one dtype, are the two parts
        of the queries. The latents of the step's new tokens must have been stored. With a `selection`, a token sees
        those tokens alone. Returns [num_tokens, heads, rank].
        """

    @abstractmethod
    def partial_latent_attention(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, batch: Batch, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Like `latent_attention`, of latents that are some of a sequence's.

        Returns the outputs and logarithms that `Backend.merge_attention` takes; see `Backend.partial_attention`.
        """
