"""Attention in both directions within each sequence of a step: nothing is cached."""

from typing import Any

from torch import Tensor

from quire.executor.layers.attention.grouped_query import (
    Attention,
    AttentionShape,
    LayerPlace,
    kv_head_shard,
    normed_heads,
    own_form,
)
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.ops.backend import AttentionForm


class SequenceAttention:
    """Projections, optional q/k norms, rotation, attention and output. Every rank has an equal part of the heads.

    Attributes:
        kv: None, because nothing is cached.
        activation_size: values that the layer computes for a token: the projections, their rotation and the outputs.
    """

    kv = None

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: AttentionShape,
        rotary: RotaryEmbedding | None = None,
        *,
        bias: bool = True,
        output_bias: bool = True,
        form: AttentionForm | None = None,
        qk_norm: NormStyle | None = None,
    ) -> None:
        """Takes `form` for the whole model's heads; None: all tokens are seen, with the scale `head_dim**-0.5`."""
        head_dim, size = shape.head_dim, shape.num_heads * shape.head_dim
        self._ops = context.ops
        self._rotary = rotary
        self._head_dim = head_dim
        self.num_heads = context.share(shape.num_heads, "attention heads")
        self._form = own_form(context, form or AttentionForm(head_dim**-0.5))
        kv_shard = kv_head_shard(context, shape.num_kv_heads, head_dim)
        kv_size = shape.num_kv_heads * head_dim
        self._num_kv_heads = (kv_shard.stop - kv_shard.start) // head_dim
        self.activation_size = (3 * self.num_heads + 4 * self._num_kv_heads) * head_dim
        q_shard = context.shard(0, size, "query outputs")
        parts = [
            LinearPart(f"{name}.q_proj", size, q_shard),
            LinearPart(f"{name}.k_proj", kv_size, kv_shard),
            LinearPart(f"{name}.v_proj", kv_size, kv_shard),
        ]
        self._project = ColumnLinear(context, parts, shape.hidden_size, bias=bias)
        self._output = RowLinear(
            context, f"{name}.o_proj", size, shape.hidden_size, q_shard._replace(dim=1), bias=output_bias
        )

        self._qk_norm = None
        if qk_norm is not None:
            self._qk_norm = normed_heads(context, name, qk_norm, head_dim, self.num_heads, self._num_kv_heads)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[num_tokens, hidden] → [num_tokens, hidden]."""
        heads = self._project(x).unflatten(1, (-1, self._head_dim))
        rotation = None if self._rotary is None else step.rotation(self._rotary)
        form = self._form_of(heads)
        out = self._ops.sequence_attention(
            heads, self._num_kv_heads, step.sequences, form, rotation=rotation, norm=self._qk_norm
        )
        return self._output(out.flatten(1))

    def outputs_of(self, rows: Tensor, step: StepContext) -> Tensor:
        """Returns the `rows` of all tokens: each has an output."""
        return rows

    def _form_of(self, heads: Tensor) -> AttentionForm:
        """Returns the form for `heads` [num_tokens, num_heads + 2 * num_kv_heads, head_dim], those of a step."""
        return self._form


def self_attention(
    context: ModelContext,
    place: LayerPlace,
    shape: AttentionShape,
    rotary: RotaryEmbedding | None,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    **options: Any,
) -> Attention | SequenceAttention:
    """Builds the attention of a decoder's layer; of one that serves as an encoder, attention in both directions.

    `options` are those that the two have in common.
    """
    if not context.is_encoder:
        return Attention(context, place, shape, rotary, qkv_bias=qkv_bias, output_bias=output_bias, **options)
    name = f"{place.name}.self_attn"
    return SequenceAttention(context, name, shape, rotary, bias=qkv_bias, output_bias=output_bias, **options)
