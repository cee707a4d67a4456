"""The operations of multi-head latent attention (arXiv:2405.04434): all heads share one key a token.

That key is [latent | rotated key]; its latent, of `rank` elements, is the value, too. A layer's cache is [num_pages,
block_size, row_size(rank) + row_size(rotary_dim)]. Its pages, and the rows of tokens in them, may lie apart. In a
quantized cache, latent and rotated key have separate scales (`quire.ops.cache_rows`), because the rotated key is not
normalized and may be many times as large.

In sparse attention (arXiv:2512.02556, section 2.1) a token also has an index key, a row in a separate cache. Index
queries select the tokens that attention sees. In compressed attention, a row may be for several tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

Batch = TypeVar("Batch")
"""The batch of `quire.ops.backend.Batch`."""


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


class NewLatents(NamedTuple):
    """A step's projections, and the places of its latents: the arguments of `rotate_and_store_latent`.

    Attributes:
        q: [num_tokens, heads, rotary_dim], the rotated part of the queries.
        latent: [num_tokens, rank + rotary_dim]: the latents, and the keys that are rotated like the queries.
        norm: the weight [rank] and the eps that normalize the latents.
        cos: and `sin`: as for `Backend.rotary`; without dimensions, nothing is rotated.
        cache: the layer's cache.
        slot_mapping: [num_tokens] int64.
        is_interleaved: pairs are (2i, 2i + 1) and come out as (i, i + rotary_dim / 2), in queries and keys alike, which
            preserves their products.
    """

    q: Tensor
    latent: Tensor
    norm: tuple[Tensor, float]
    cos: Tensor
    sin: Tensor
    cache: Tensor
    slot_mapping: Tensor
    is_interleaved: bool


class LatentOperations(ABC, Generic[Batch]):
    """The operations of latent attention on one kind of device."""

    @abstractmethod
    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """A linear layer for each head: `x` [num_tokens, heads, in] times `weight` [heads, in, out], of one dtype.

        Returns [num_tokens, heads, out].
        """

    @abstractmethod
    def rotate_and_store_latent(self, new: NewLatents) -> Tensor:
        """Runs the operations between the projections and the attention.

        Latents are normalized, keys and queries rotated, and latents and keys stored as finite values (see
        `Backend.write_kv`). Returns the rotated queries, dense.
        """

    @abstractmethod
    def store_rows(self, x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Stores `x` [num_tokens, size] in the slots of `slot_mapping` [num_tokens] int64 as finite values.

        `cache` is [num_pages, block_size, row_size(size)].
        """

    @abstractmethod
    def select_tokens(
        self, q: Tensor, weights: Tensor, cache: Tensor, batch: Batch, *, top_k: int, scale: float
    ) -> Selection:
        """Selects the `top_k` tokens with the highest scores, among a token and those before it; all if they are not
        more.

        The score of a key is the sum over heads of `weight * relu(scale * q·key)`, in float32; of equal scores, the
        earlier token is taken. `q` [num_tokens, heads, size] and `weights` [num_tokens, heads] are of one dtype;
        `cache` [num_pages, block_size, row_size(size)] has the keys, including those of the step's new tokens.
        """

    def select_rows(self, q: Tensor, weights: Tensor, rows: CacheRows, *, top_k: int, scale: float) -> CacheRows:
        """Returns the rows of `best_rows`."""
        if rows.slots.shape[1] <= top_k:
            return rows
        best = self.best_rows(q, weights, rows, top_k=top_k, scale=scale)
        return CacheRows(rows.cache, rows.slots.gather(1, best), rows.counts.clamp_max(top_k))

    @abstractmethod
    def best_rows(self, q: Tensor, weights: Tensor, rows: CacheRows, *, top_k: int, scale: float) -> Tensor:
        """Selects the `top_k` rows with the highest scores among those that a token may see, in order; all if not more.

        `rows` have the index keys. Scores, `q` and `weights` are as for `select_tokens`. Returns columns of
        `rows.slots`, [num_tokens, at most top_k] int64. Past a token's count they are arbitrary.
        """

    @abstractmethod
    def attend_rows(self, q: Tensor, rows: Sequence[CacheRows], sinks: Tensor, *, scale: float) -> Tensor:
        """Attends from each token to all rows that it may see: a row is the key and the value of all heads.

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
        """Runs causal attention in the latent space.

        `q` [num_tokens, heads, rank] and `q_rotated` [num_tokens, heads, rotary_dim], of one dtype, are the two parts
        of the queries. The latents of the step's new tokens must have been stored. With a `selection`, a token sees
        only those tokens. Returns [num_tokens, heads, rank].
        """

    @abstractmethod
    def partial_latent_attention(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, batch: Batch, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attends to the latents of some of a sequence's tokens, as `latent_attention` does.

        Returns outputs and logarithms for `Backend.merge_attention`; see `Backend.partial_attention`.
        """
