"""Grouped-query self-attention over the paged cache (arXiv:2305.13245)."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.layer_kv import LayerKV, kept_tokens
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import AdaptedLinear, ColumnLinear, LowRankLinear, RowLinear
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext, Wanted
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.ops.backend import AttentionForm, NewHeads


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of the whole model's attention, before it is split over ranks.

    Attributes:
        hidden_size: of the input of the projections to queries, keys and values.
        output_size: of the outputs; None: `hidden_size`.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    output_size: int | None = None


@dataclass(frozen=True)
class LayerPlace:
    """A layer's place in the model.

    Attributes:
        index: among all layers of the model.
        number: among this rank's layers with keys and values (or, for a recurrent layer, with a state), and so among
            their caches (or states). A layer without a cache has the number of the one whose keys and values it reads.
        is_last: no layer of the model attends to its outputs.
    """

    index: int
    number: int
    is_last: bool

    @property
    def name(self) -> str:
        """The layer's name in checkpoints."""
        return f"model.layers.{self.index}"


class Attention:
    """Projections, optional q/k norms, rotation, cache and output of one layer.

    Every rank has an equal part of the query heads and the KV heads that they read. With more ranks than KV heads,
    neighbouring ranks hold the same one.

    Attributes:
        kv: the keys and values that the layer caches.
        parts: of the projection to queries, keys and values.
        activation_size: values that the layer computes for a token: the projections, rotated queries and their outputs.
    """

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        shape: AttentionShape,
        rotary: RotaryEmbedding | None,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: NormStyle | None = None,
        form: AttentionForm | None = None,
        is_gated: bool = False,
        has_head_gates: bool = False,
    ) -> None:
        """Takes `qk_norm` to normalize each head of queries and keys. Without `rotary`, nothing is rotated.

        `form` is that of the whole model's heads; None: causal, with the scale `head_dim**-0.5`. If `is_gated`, the
        query projection has a head's queries and then its gate, whose sigmoid multiplies the head's outputs. With
        `has_head_gates`, the projection `g_proj` has one such gate for each head.
        """
        head_dim, name = shape.head_dim, f"{place.name}.self_attn"
        self._ops = context.ops
        self._sequences = context.sequences
        self._place = place
        self._rotary = rotary
        self._no_rotation = torch.empty(1, 1, 0, dtype=context.dtype, device=context.device)
        self._head_dim = head_dim
        self._num_heads = context.share(shape.num_heads, "attention heads")
        self._form = own_form(context, form or AttentionForm(head_dim**-0.5))
        self._is_plain = type(self)._store is Attention._store and type(self)._attend is Attention._attend
        kv_shard = kv_head_shard(context, shape.num_kv_heads, head_dim)
        kv_heads = range(kv_shard.start // head_dim, kv_shard.stop // head_dim)
        self.kv = LayerKV(len(kv_heads), head_dim, kept_tokens(self._form))
        self._cache_scales = context.read_cache_scales(name, shape.num_kv_heads, kv_heads)
        self.activation_size = ((5 if is_gated else 3) * self._num_heads + 2 * self.kv.num_kv_heads) * head_dim
        self.activation_size += context.sequences.activation_size(self._num_heads, head_dim, head_dim)

        q_shard = context.shard(0, shape.num_heads * head_dim, "query outputs")
        queries, gates = _query_parts(f"{name}.q_proj", shape, q_shard, is_gated=is_gated)
        if has_head_gates:
            gates.append(head_gates(context, f"{name}.g_proj", shape.num_heads))
        self.parts = parts = [
            *queries,
            LinearPart(f"{name}.k_proj", shape.num_kv_heads * head_dim, kv_shard),
            LinearPart(f"{name}.v_proj", shape.num_kv_heads * head_dim, kv_shard),
            *gates,
        ]
        self._qkv_size = (self._num_heads + 2 * self.kv.num_kv_heads) * head_dim
        self._is_gated = bool(gates)
        self._project: ColumnLinear | AdaptedLinear = ColumnLinear(context, parts, shape.hidden_size, bias=qkv_bias)
        self._output = RowLinear(
            context, f"{name}.o_proj", shape.num_heads * head_dim, shape.output_size or shape.hidden_size,
            Shard(1, q_shard.start, q_shard.stop), bias=output_bias,
        )  # fmt: skip
        self._qk_norm: tuple[Tensor, float] | None = None
        if qk_norm is not None:
            self._qk_norm = normed_heads(context, name, qk_norm, head_dim, self._num_heads, self.kv.num_kv_heads)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        projected = self._project(x)
        heads = projected[:, : self._qkv_size].unflatten(1, (-1, self._head_dim))
        out = self._mix(heads, step).flatten(1)
        if self._is_gated:
            gate = self.outputs_of(projected[:, self._qkv_size :], step)
            out = self._ops.recurrent.multiply_gate(out, gate, "sigmoid")
        return self._output(out)

    def used_at(self, place: LayerPlace, adapter: LowRankLinear | None) -> "Attention":
        """Returns the same weights in another layer, with an adapter of the projection to queries, keys and values."""
        twin = copy.copy(self)
        twin._place = place
        if adapter is not None:
            twin._project = AdaptedLinear(self._ops, self._project, adapter)
        return twin

    def _mix(self, heads: Tensor, step: StepContext) -> Tensor:
        """Stores keys and values of `heads`, and attends: [num_outputs, num_heads, head_dim]."""
        pages, group = step.caches[self._place.number]
        wanted = step.wanted if self._place.is_last else None
        if wanted is None and self._is_plain and not self._sequences.is_divided:
            batch = step.attention[group]
            new = self._new_heads(heads, step, pages, batch.slot_mapping)
            return self._ops.rotate_and_attend(new, batch, self._form)
        q = self._store(heads, step, pages, step.attention[group].slot_mapping)
        if wanted is not None:
            q = self.outputs_of(q.flatten(1), step).unflatten(1, q.shape[1:])
        return self._attend(q, step, wanted)

    def _store(self, heads: Tensor, step: StepContext, pages: Tensor, slot_mapping: Tensor) -> Tensor:
        """Normalizes and rotates `heads`, see `Backend.rotate_and_store`; stores keys and values; returns queries."""
        return self._ops.rotate_and_store(self._new_heads(heads, step, pages, slot_mapping))

    def _new_heads(self, heads: Tensor, step: StepContext, pages: Tensor, slot_mapping: Tensor) -> NewHeads:
        return NewHeads(
            heads, *self._rotation(step), pages, slot_mapping, norm=self._qk_norm, scales=self._cache_scales
        )  # fmt: skip

    def _attend(self, q: Tensor, step: StepContext, wanted: Wanted | None) -> Tensor:
        """Attends from `q` [num_tokens, num_heads, head_dim]: the wanted tokens if given, else all of the step's."""
        pages, group = step.caches[self._place.number]
        return self._sequences.attend(self._ops, q, pages, wanted or step, group, self._form)

    def _rotation(self, step: StepContext) -> tuple[Tensor, Tensor]:
        return (self._no_rotation, self._no_rotation) if self._rotary is None else step.rotation(self._rotary)

    def outputs_of(self, rows: Tensor, step: StepContext) -> Tensor:
        """Selects the `rows` [num_tokens, size] of tokens with an output: all, or in the last layer the wanted ones."""
        if self._place.is_last and step.wanted is not None:
            return self._ops.take_rows(rows, step.wanted.tokens)
        return rows


def _query_parts(
    name: str, shape: AttentionShape, shard: Shard, *, is_gated: bool
) -> tuple[list[LinearPart], list[LinearPart]]:
    """Returns the parts of a query projection with queries, and those with gates. They alternate by head."""
    size, head_dim = shape.num_heads * shape.head_dim, shape.head_dim
    if not is_gated:
        return [LinearPart(name, size, shard)], []
    starts = range(2 * shard.start, 2 * shard.stop, head_dim)
    halves = [LinearPart(name, 2 * size, Shard(0, start, start + head_dim)) for start in starts]
    return halves[::2], halves[1::2]


def normed_heads(
    context: ModelContext, name: str, style: NormStyle, head_dim: int, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, float]:
    """Reads the norms of queries and keys, for `Backend.rotate_and_store`: the weights of each head, and the eps."""
    q_weight = style.read(context, f"{name}.q_norm", head_dim).expand(num_heads, -1)
    k_weight = style.read(context, f"{name}.k_norm", head_dim).expand(num_kv_heads, -1)
    return torch.cat((q_weight, k_weight)), style.eps


def head_gates(context: ModelContext, name: str, num_heads: int) -> LinearPart:
    """Returns the rank's part of a projection that has one output for each head."""
    return LinearPart(name, num_heads, context.shard(0, num_heads, "attention heads"))


def own_form(context: ModelContext, form: AttentionForm) -> AttentionForm:
    """Returns the form of the rank's query heads. Raises ModelLoadError if it cannot be used where sequences are
    divided.
    """
    context.sequences.check(form)

    def own(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        shard = context.shard(0, len(values), "attention heads")
        return values[shard.start : shard.stop].to(context.device, torch.float32)

    return form._replace(sinks=own(form.sinks), slopes=own(form.slopes), distance_bias=own(form.distance_bias))


def kv_head_shard(context: ModelContext, num_kv_heads: int, head_dim: int) -> Shard:
    """Returns the rank's rows of a key or value projection."""
    size, rank = context.group.size, context.group.rank
    context.sequences.check_heads(size, num_kv_heads)
    if max(size, num_kv_heads) % min(size, num_kv_heads):
        raise ModelLoadError(
            f"tensor_parallel_size {size} fits neither into nor around the model's {num_kv_heads} KV heads; "
            f"choose a divisor or a multiple of {num_kv_heads}."
        )
    count = max(1, num_kv_heads // size)
    first = rank * num_kv_heads // size
    return Shard(0, first * head_dim, (first + count) * head_dim)
