"""Grouped-query self-attention over the paged cache (arXiv:2305.13245)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, Part, RowLinear
from quire.executor.weights.readers import Shard
from quire.ops.backend import AttentionBatch


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of the whole model's attention, before it is split over ranks."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Wanted(NamedTuple):
    """The tokens of a step whose hidden states will be read: of the others the last layer makes keys and values only.

    Attributes:
        tokens: [num_wanted] int64; indices into the step's tokens.
        batch: their attention, each a row of its own with one query.
    """

    tokens: Tensor
    batch: AttentionBatch


class Attention:
    """Projections, optional q/k norms, rotation, cache and output of one layer.

    Every rank has an equal part of the query heads and the KV heads they read; when there are more ranks than KV
    heads, neighbouring ranks hold the same one.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: AttentionShape,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
    ) -> None:
        """With `qk_norm_eps` each head of queries and keys is normalised; `window` counts the token itself."""
        head_dim = shape.head_dim
        self._ops = context.ops
        self._window = window
        self._head_dim = head_dim
        self._scale = head_dim**-0.5
        self._num_heads = context.share(shape.num_heads, "attention heads")
        kv_shard = kv_head_shard(context, shape.num_kv_heads, head_dim)
        self.num_kv_heads = (kv_shard.stop - kv_shard.start) // head_dim

        q_shard = context.shard(0, shape.num_heads * head_dim, "query outputs")
        parts = [
            Part(f"{name}.q_proj", shape.num_heads * head_dim, q_shard),
            Part(f"{name}.k_proj", shape.num_kv_heads * head_dim, kv_shard),
            Part(f"{name}.v_proj", shape.num_kv_heads * head_dim, kv_shard),
        ]
        self._qkv = ColumnLinear(context, parts, shape.hidden_size, bias=qkv_bias)
        self._output = RowLinear(
            context, f"{name}.o_proj", shape.num_heads * head_dim, shape.hidden_size,
            Shard(1, q_shard.start, q_shard.stop), bias=output_bias,
        )  # fmt: skip
        self._qk_norm: tuple[Tensor, float] | None = None
        if qk_norm_eps is not None:
            q_weight = context.read(f"{name}.q_norm.weight", (head_dim,)).expand(self._num_heads, -1)
            k_weight = context.read(f"{name}.k_norm.weight", (head_dim,)).expand(self.num_kv_heads, -1)
            self._qk_norm = (torch.cat((q_weight, k_weight)), qk_norm_eps)

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        batch: AttentionBatch,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """`x` [num_tokens, hidden] → [num_tokens or num_wanted, hidden]; `kv_cache` is this layer's."""
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        q = self._ops.rotate_and_store(heads, cos, sin, kv_cache, batch.slot_mapping, norm=self._qk_norm)
        if wanted is not None:
            q, batch = self._ops.take_rows(q.flatten(1), wanted.tokens).unflatten(1, q.shape[1:]), wanted.batch
        out = self._ops.attention(q, kv_cache, batch, scale=self._scale, window=self._window)
        return self._output(out.reshape(len(q), -1))


def kv_head_shard(context: ModelContext, num_kv_heads: int, head_dim: int) -> Shard:
    """The rank's rows of a key or value projection."""
    size, rank = context.group.size, context.group.rank
    if max(size, num_kv_heads) % min(size, num_kv_heads):
        raise ModelLoadError(
            f"tensor_parallel_size {size} fits neither into nor around the model's {num_kv_heads} KV heads; "
            f"choose a divisor or a multiple of {num_kv_heads}."
        )
    count = max(1, num_kv_heads // size)
    first = rank * num_kv_heads // size
    return Shard(0, first * head_dim, (first + count) * head_dim)
