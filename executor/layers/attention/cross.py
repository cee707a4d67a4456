"""Attention of a decoder to what an encoder has read (arXiv:1706.03762, 3.2.3)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.executor.layers.attention.grouped_query import AttentionShape, LayerPlace, kv_head_shard
from quire.executor.layers.attention.layer_kv import LayerKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.ops.backend import AttentionForm


class CrossAttention:
    """Queries of the decoder's tokens, keys and values of the encoder's. Every rank has an equal part of the heads.

    Keys and values are computed once, when an input is encoded, and lie in pages from then on.

    Attributes:
        kv: the keys and values that the layer caches.
        activation_size: values that the layer computes for a token: queries and outputs, or keys and values.
        group: ranks that have a part of the heads each.
        keeps_queries: `queries` are kept.
        queries: [num_outputs, num_heads, head_dim] of the last step, of this rank's heads; None: no step kept them.
    """

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        shape: AttentionShape,
        *,
        encoder_size: int | None = None,
        bias: bool = False,
        form: AttentionForm | None = None,
    ) -> None:
        """Takes as `encoder_size` the width of the encoder's output; None: the decoder's.

        `place.number` is the layer's among the caches. `form` is that of all heads; None: with the scale
        `head_dim**-0.5`.
        """
        name, head_dim, size = f"{place.name}.cross_attn", shape.head_dim, shape.num_heads * shape.head_dim
        self._ops = context.ops
        self._place = place
        self._head_dim = head_dim
        self.group = context.group
        self.keeps_queries = False
        self.queries: Tensor | None = None
        self._form = form or AttentionForm(head_dim**-0.5)
        num_heads = context.share(shape.num_heads, "attention heads")
        kv_shard, kv_size = kv_head_shard(context, shape.num_kv_heads, head_dim), shape.num_kv_heads * head_dim
        kv_heads = range(kv_shard.start // head_dim, kv_shard.stop // head_dim)
        self.kv = LayerKV(len(kv_heads), head_dim, is_cross=True)
        self._cache_scales = context.read_cache_scales(name, shape.num_kv_heads, kv_heads)
        self.activation_size = 2 * max(num_heads, len(kv_heads)) * head_dim
        q_shard = context.shard(0, size, "query outputs")
        self._heads = range(q_shard.start // head_dim, q_shard.stop // head_dim)
        self._queries_per_kv_head = max(1, num_heads // len(kv_heads))
        self._q = ColumnLinear(context, [LinearPart(f"{name}.q_proj", size, q_shard)], shape.hidden_size, bias=bias)
        parts = [LinearPart(f"{name}.{part}", kv_size, kv_shard) for part in ("k_proj", "v_proj")]
        self._kv = ColumnLinear(context, parts, encoder_size or shape.hidden_size, bias=bias)
        self._output = RowLinear(
            context, f"{name}.o_proj", size, shape.hidden_size, q_shard._replace(dim=1), bias=bias
        )  # fmt: skip

    def store(self, encoded: Tensor, step: StepContext) -> None:
        """Stores keys and values of the encoder's output, `encoded` [num_tokens, encoder_size]."""
        pages, group = step.caches[self._place.number]
        k, v = self._kv(encoded).unflatten(1, (2, -1, self._head_dim)).unbind(1)
        self._ops.write_kv(k, v, pages, step.encoder_slots[group], self._cache_scales)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Maps `x` [num_outputs, hidden] to the same, of the tokens that the self-attention has outputs for."""
        pages, group = step.caches[self._place.number]
        wanted = step.wanted if self._place.is_last else None
        q = self._q(x).unflatten(1, (-1, self._head_dim))
        if self.keeps_queries:
            self.queries = q
        out = self._ops.attention(q, pages, (wanted or step).attention[group], self._form)
        return self._output(out.flatten(1))

    def weights(self, heads: Sequence[int], tokens: slice, pages: Tensor, slots: Tensor) -> Tensor:
        """Computes how much kept queries attend to the encoder's rows in `slots` [num_rows] int64, float32.

        `heads` are numbers in the whole model; others than this rank's are left out. `tokens` are indices among the
        outputs of the last step. Returns [num_own_heads, num_tokens, num_rows]; a row of weights has the sum 1.
        """
        assert self.queries is not None, "the step was to keep its queries"
        own = [self._heads.index(head) for head in heads if head in self._heads]
        keys, _ = self._ops.read_kv(pages, slots)
        k = keys[:, [head // self._queries_per_kv_head for head in own]].float()
        q = self.queries[tokens][:, own].float()
        return (torch.einsum("nhd,rhd->hnr", q, k) * self._form.scale).softmax(-1)
