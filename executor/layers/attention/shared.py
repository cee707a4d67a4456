"""Attention over keys and values of another layer (arXiv:2405.05254, 2405.12981): a layer without pages."""

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention, AttentionShape, LayerPlace, own_form
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.ops.backend import AttentionForm


class SharedAttention:
    """Queries and output of one of the last layers, which read the keys and values of an earlier layer.

    No layer attends to the outputs of these layers. So the last layer before them drops all tokens except the wanted
    ones (`LayerPlace.is_last`), and they compute only those.

    Attributes:
        kv: None, because it caches nothing.
        activation_size: values that the layer computes for each token.
    """

    kv = None

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        shape: AttentionShape,
        rotary: RotaryEmbedding,
        *,
        form: AttentionForm,
        q_norm: NormStyle,
        bias: bool = False,
    ) -> None:
        """Takes a `place` whose `number` is that of the layer whose keys and values it reads. Both have the same
        `form`.
        """
        name, head_dim, size = f"{place.name}.self_attn", shape.head_dim, shape.num_heads * shape.head_dim
        num_heads = context.share(shape.num_heads, "attention heads")
        shard = context.shard(0, size, "query outputs")
        self._ops = context.ops
        self._sequences = context.sequences
        self._place = place
        self._rotary = rotary
        self._form = own_form(context, form)
        self._head_dim = head_dim
        self._q = ColumnLinear(context, [LinearPart(f"{name}.q_proj", size, shard)], shape.hidden_size, bias=bias)
        self._norm = (q_norm.read(context, f"{name}.q_norm", head_dim), q_norm.eps)
        self._output = RowLinear(
            context, f"{name}.o_proj", size, shape.hidden_size, shard._replace(dim=1), bias=bias
        )  # fmt: skip
        self.activation_size = 3 * num_heads * head_dim

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_wanted, hidden] → the same shape."""
        pages, group = step.caches[self._place.number]
        heads = self._q(x).unflatten(1, (-1, self._head_dim))
        q = self._ops.rotary(self._ops.rms_norm(heads, *self._norm), *step.wanted_rotation(self._rotary))
        out = self._sequences.attend(self._ops, q, pages, step.wanted or step, group, self._form)
        return self._output(out.flatten(1))

    def outputs_of(self, rows: Tensor, step: StepContext) -> Tensor:
        """Selects all rows, which are those of the wanted tokens."""
        return rows


class ValueNormAttention(Attention):
    """Each head of queries, keys and values is normalized, the values without a weight."""

    def __init__(
        self, context: ModelContext, place: LayerPlace, shape: AttentionShape, rotary: RotaryEmbedding,
        norm: NormStyle, *, form: AttentionForm, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            context, place, shape, rotary, qkv_bias=bias, output_bias=bias, qk_norm=norm, form=form
        )  # fmt: skip
        assert self._qk_norm is not None
        weight, eps = self._qk_norm
        self._qk_norm, self._norm = None, (torch.cat((weight, torch.ones_like(weight[: self.kv.num_kv_heads]))), eps)

    def _store(self, heads: Tensor, step: StepContext, pages: Tensor, slot_mapping: Tensor) -> Tensor:
        return super()._store(self._ops.rms_norm(heads, *self._norm), step, pages, slot_mapping)


def sharing_places(context: ModelContext, types: list[str], num_layers: int, num_shared: int) -> list[LayerPlace]:
    """Lists the places of a model whose last `num_shared` layers read keys and values of the last layer of their type.

    Args:
        types: each layer's type.

    Raises:
        ModelLoadError: no earlier layer has the type of one of these, or a rank builds only one of the two.
    """
    first_shared = num_layers - num_shared
    sources = {kind: index for index, kind in enumerate(types[:first_shared])}
    missing = sorted(set(types[first_shared:num_layers]) - set(sources))
    if missing:
        raise ModelLoadError(
            f"config.json: the last {num_shared} layers (num_kv_shared_layers) read keys and values of a layer of "
            f"their type, but no layer before them is of type {', '.join(missing)}."
        )
    owners = [index for index in context.layers if index < first_shared]

    def place(index: int) -> LayerPlace:
        source = index if index < first_shared else sources[types[index]]
        if source not in owners:
            raise ModelLoadError(
                f"Layer {index} reads keys and values of layer {source}, which is in another pipeline stage: name "
                "stages of which one has both in QUIRE_PP_LAYER_PARTITION, or use a smaller --pipeline-parallel-size."
            )
        return LayerPlace(index, owners.index(source), is_last=index == first_shared - 1)

    return [place(index) for index in context.layers]
