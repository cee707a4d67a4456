"""Attention in a program: from one projection to the attended heads in our operations, where the formula is ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.executor.layers.step_context import StepContext
from quire.executor.models.transformers import parts
from quire.executor.models.transformers.formulas import agree, constants_of, evaluated, examples
from quire.executor.models.transformers.program import AttendingStep, Call, InStep, Meta, Program, Ref
from quire.ops.backend import AttentionForm, Backend

_POSITIONS = (0, 1, 2, 17, 300)
"""Of the tokens on which formulas are compared."""


@dataclass(eq=False)
class Attention(AttendingStep):
    """`query` [1, heads, num_tokens, size], keys and values likewise → [1, num_tokens, heads, size of values]."""

    ops: Backend
    number: int  # of the layer's cache
    form: AttentionForm
    head_dim: int  # that the cache has

    def __call__(
        self, step: StepContext, query: Tensor, key: Tensor, value: Tensor, *, is_last: bool = False
    ) -> Tensor:
        pages, group = step.caches[self.number]
        q, k, v = (_padded(x[0].transpose(0, 1), self.head_dim) for x in (query, key, value))
        self.ops.write_kv(k, v, pages, step.attention[group].slot_mapping)
        return attended(self, step, q, is_last=is_last)[..., : value.shape[3]].unsqueeze(0)


@dataclass(eq=False)
class RotatedAttention(AttendingStep):
    """The same of a projection [1, num_tokens, (query heads, KV heads, KV heads) * size], and cosines and sines."""

    ops: Backend
    number: int
    form: AttentionForm
    head_dim: int
    norm: tuple[Tensor, float] | None

    def __call__(
        self, step: StepContext, projected: Tensor, cos: Tensor, sin: Tensor, *, is_last: bool = False
    ) -> Tensor:
        pages, group = step.caches[self.number]
        heads = projected[0].unflatten(1, (-1, self.head_dim))
        q = self.ops.rotate_and_store(heads, cos, sin, pages, step.attention[group].slot_mapping, norm=self.norm)
        return attended(self, step, q, is_last=is_last).unsqueeze(0)


@dataclass(eq=False)
class PartedAttention(AttendingStep):
    """The same of queries, keys and values apart, each [1, num_tokens, heads * size]."""

    ops: Backend
    number: int
    form: AttentionForm
    head_dim: int

    def __call__(
        self,
        step: StepContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        is_last: bool = False,
    ) -> Tensor:
        pages, group = step.caches[self.number]
        q, k, v = (x[0].unflatten(1, (-1, self.head_dim)) for x in (query, key, value))
        if cos.shape[-1]:
            q, k = self.ops.rotary(q, cos, sin), self.ops.rotary(k, cos, sin)
        self.ops.write_kv(k, v, pages, step.attention[group].slot_mapping)
        return attended(self, step, q, is_last=is_last).unsqueeze(0)


def attended(
    layer: Attention | RotatedAttention | PartedAttention, step: StepContext, q: Tensor, *, is_last: bool
) -> Tensor:
    """Attention of `q` [num_tokens, heads, size], or of the wanted tokens among them."""
    pages, group = step.caches[layer.number]
    if is_last:
        assert step.wanted is not None
        q = layer.ops.take_rows(q.flatten(1), step.wanted.tokens).unflatten(1, q.shape[1:])
        return layer.ops.attention(q, pages, step.wanted.attention[group], layer.form)
    return layer.ops.attention(q, pages, step.attention[group], layer.form)


@dataclass(eq=False)
class Rotation(InStep):
    """Cosines and sines of a step's positions, both [num_tokens, 1, rotary_dim]."""

    ops: Backend
    frequencies: Tensor
    scale: float
    dtype: torch.dtype

    def __call__(self, step: StepContext) -> tuple[Tensor, Tensor]:
        return self.ops.rotation(step.positions, self.frequencies, self.scale, self.dtype)


class _Form(NamedTuple):
    """What happens to heads before attention; without frequencies, they are not rotated.

    `sources` is a projection of all heads, or queries, keys and values.
    """

    sources: tuple[int, ...]
    frequencies: Tensor | None
    scale: float
    norm: tuple[Tensor, float] | None


def fuse_heads(program: Program, ops: Backend, positions: int, device: torch.device) -> None:
    """Puts rotation and attention where they compute what the class does. `positions` is an input of the program."""
    rotations: dict[tuple[int, float], Call] = {}
    for place, call in enumerate(program.calls):
        form = _read_form(program, call, positions) if isinstance(call.function, Attention) else None
        if form is None:
            continue
        layer, dtype = call.function, program.metas[form.sources[0]].dtype
        assert isinstance(layer, Attention)
        fused: PartedAttention | RotatedAttention = PartedAttention(ops, layer.number, layer.form, layer.head_dim)
        if len(form.sources) == 1:
            fused = RotatedAttention(ops, layer.number, layer.form, layer.head_dim, form.norm)
        if form.frequencies is None:
            none = torch.empty(1, 1, 0, dtype=dtype, device=device)
            cos_sin: tuple[Any, ...] = (none, none)
        else:
            key = (id(form.frequencies), form.scale)
            if key not in rotations:
                rotations[key] = _rotation(program, Rotation(ops, form.frequencies, form.scale, dtype))
            cos_sin = tuple(Ref(out) for out in rotations[key].outs if out is not None)
        program.calls[place] = Call(fused, (*map(Ref, form.sources), *cos_sin), {}, call.outs)
    program.calls[:0] = rotations.values()
    program.drop_unused()


def _rotation(program: Program, rotation: Rotation) -> Call:
    """The call of a rotation, which makes cosines and sines."""
    size = 2 * len(rotation.frequencies)
    outs = tuple(program.add_value(Meta((1, 1, size), rotation.dtype, -1, axis=0)) for _ in range(2))
    return Call(rotation, (), {}, outs, is_single=False)


def _read_form(program: Program, call: Call, positions: int) -> _Form | None:
    """The form of the heads that a call of attention gets, or None if it is none of ours."""
    sizes = [program.metas[ref.index].shape for ref in call.args]
    head_dim = sizes[0][3]
    num_heads, num_kv_heads = sizes[0][1], sizes[1][1]
    if any(size[3] != head_dim for size in sizes) or call.function.head_dim != head_dim:  # type: ignore[attr-defined]
        return None
    widths = [heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
    for read_sources in (_one_source, _three_sources):
        found = read_sources(program, call, positions, head_dim, widths)
        if found is not None:
            form = _compared(program, call, positions, *found, head_dim, widths)
            if form is not None:
                return form
    return None


_Sources = tuple[tuple[int, ...], list[Call]]
"""The values at which formulas start, and the calls from there to attention."""


def _one_source(program: Program, call: Call, positions: int, head_dim: int, widths: list[int]) -> _Sources | None:
    calls, starts = program.slice_to([ref.index for ref in call.args], _is_layer)
    starts.discard(positions)
    if len(starts) != 1 or program.metas[min(starts)].shape[-1] != sum(widths):
        return None
    return (min(starts),), calls


def _three_sources(program: Program, call: Call, positions: int, head_dim: int, widths: list[int]) -> _Sources | None:
    """Each after a norm over all heads, if there is one, and as one row a token."""

    def stops(each: Call) -> bool:
        is_norm = isinstance(each.function, parts.RMSNorm) and len(each.function.weight) != head_dim
        return _is_layer(each) or is_norm or each.function is Tensor.narrow

    found = []
    for ref, width in zip(call.args, widths, strict=True):
        _, starts = program.slice_to([ref.index], stops)
        starts.discard(positions)
        if len(starts) != 1 or program.metas[min(starts)].shape[-1] != width:
            return None
        found.append(min(starts))
    return tuple(found), program.slice_to([ref.index for ref in call.args], stops)[0]


def _compared(
    program: Program,
    call: Call,
    positions: int,
    sources: tuple[int, ...],
    calls: list[Call],
    head_dim: int,
    widths: list[int],
) -> _Form | None:
    """The form whose formula `calls` compute, or None."""
    num_heads, num_kv_heads, _ = (width // head_dim for width in widths)
    norm = _read_norm(program, call, calls, num_heads, num_kv_heads) if len(sources) == 1 else None
    constants = [each for step in calls for each in constants_of((step.args, step.kwargs))]
    frequencies = [each for each in constants if _may_be_frequencies(each, head_dim)]
    num_tokens = len(_POSITIONS)
    projected = examples(1, num_tokens, sum(widths))
    rows = [projected] if len(sources) == 1 else projected.split(widths, dim=-1)
    given = {positions: torch.tensor(_POSITIONS), **dict(zip(sources, rows, strict=True))}
    try:
        values = evaluated(calls, given, num_tokens)
    except Exception:  # a class's code that wants what it had in the trace
        return None
    q, k, v = (values[ref.index][0].transpose(0, 1) for ref in call.args)
    qk, expected_v = projected[0].unflatten(1, (-1, head_dim)).split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if not agree(v, expected_v):
        return None
    if norm is not None:
        weight, eps = norm
        qk = qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + eps) * weight.float()
    got = torch.cat((q, k), dim=1)
    if agree(got, qk):
        return _Form(sources, None, 1.0, norm)
    for each in frequencies:
        scale = _scale(got, qk, len(each))
        if agree(got, _rotated(qk, each.float(), scale)):
            return _Form(sources, each.float().contiguous(), scale, norm)
    return None


def _is_layer(call: Call) -> bool:
    """Whether a call is a layer with weights: what it makes is where a formula starts."""
    is_part = isinstance(call.function, parts.Part) and not isinstance(call.function, parts.RMSNorm)
    return is_part or isinstance(call.function, InStep)


def _read_norm(
    program: Program, call: Call, calls: Sequence[Call], num_heads: int, num_kv_heads: int
) -> tuple[Tensor, float] | None:
    """The weights of the norms of queries and keys, [num_heads + num_kv_heads, size], and their eps."""
    norms = []
    for ref, count in zip(call.args[:2], (num_heads, num_kv_heads), strict=True):
        own, _ = program.slice_to([ref.index], _is_layer)
        found = [each.function for each in own if isinstance(each.function, parts.RMSNorm)]
        if len(found) != 1 or len(found[0].weight) != program.metas[ref.index].shape[3]:
            return None
        norms.append((found[0], count))
    (q_norm, _), (k_norm, _) = norms
    if q_norm.eps != k_norm.eps or q_norm.weight.dtype != k_norm.weight.dtype:
        return None
    return torch.cat([norm.weight.expand(count, -1) for norm, count in norms]), q_norm.eps


def _may_be_frequencies(x: Tensor, head_dim: int) -> bool:
    return x.is_floating_point() and x.dim() == 1 and 0 < 2 * len(x) <= head_dim


def _scale(got: Tensor, x: Tensor, half: int) -> float:
    """What cosines are multiplied by, from what becomes of the first token, which is at position 0."""
    return float((got[0, :, : 2 * half] / x[0, :, : 2 * half]).median())


def _rotated(x: Tensor, frequencies: Tensor, scale: float) -> Tensor:
    """`Backend.rotary` of `x` [num_tokens, heads, size]."""
    half = len(frequencies)
    angles = (torch.tensor(_POSITIONS).unsqueeze(1) * frequencies.cpu()).unsqueeze(1)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    a, b, rest = x.split((half, half, x.shape[2] - 2 * half), dim=2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=2)


def _padded(x: Tensor, head_dim: int) -> Tensor:
    """`x` [num_tokens, heads, size] with zeros after each head; they change no score."""
    return x if x.shape[2] == head_dim else F.pad(x, (0, head_dim - x.shape[2]))
