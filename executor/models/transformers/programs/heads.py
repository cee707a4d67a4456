"""Fuses attention in a program, from one projection to the attended heads, where the formula is ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.executor.layers.step_context import StepContext, Wanted
from quire.executor.models.transformers import layer_modules
from quire.executor.models.transformers.programs.evaluation import agree, examples, is_layer
from quire.executor.models.transformers.programs.program import AttendingStep, Call, Program, Ref
from quire.executor.models.transformers.programs.rotation import (
    Positions,
    RotaryForm,
    Rotations,
    ratio,
    read_rotary_form,
)
from quire.executor.parallel.context.strategy import ContextParallel
from quire.ops.backend import AttentionForm, Backend, NewHeads


@dataclass(eq=False)
class Attention(AttendingStep):
    """Attends from `query` [1, heads, num_tokens, size], keys and values alike, to [1, num_tokens, heads, size of
    values].
    """

    ops: Backend
    number: int  # of the layer's cache
    form: AttentionForm
    head_dim: int  # in the cache
    num_kv_heads: int
    sequences: ContextParallel

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Selects this operation's arguments from those of the class's attention call."""
        return query, key, value

    def __call__(
        self, step: StepContext, query: Tensor, key: Tensor, value: Tensor, *, is_last: bool = False
    ) -> Tensor:
        pages, group = step.caches[self.number]
        if key.shape[2] != query.shape[2]:
            raise ValueError(f"the class's code attends to {key.shape[2]} keys in a step of {query.shape[2]} tokens")
        q, k, v = (_padded(x[0].transpose(0, 1), self.head_dim) for x in (query, key, value))
        self.ops.write_kv(k, v, pages, step.attention[group].slot_mapping)
        return attended(self, step, q, is_last=is_last)[..., : value.shape[3]].unsqueeze(0)


@dataclass(eq=False)
class RotatedAttention(AttendingStep):
    """Attends from a projection [1, num_tokens, (query heads, KV heads, KV heads) * size], with cosines and sines."""

    ops: Backend
    number: int
    form: AttentionForm
    head_dim: int
    num_kv_heads: int
    sequences: ContextParallel
    norm: tuple[Tensor, float] | None
    is_interleaved: bool

    def __call__(
        self, step: StepContext, projected: Tensor, cos: Tensor, sin: Tensor, *, is_last: bool = False
    ) -> Tensor:
        pages, group = step.caches[self.number]
        heads = projected[0].unflatten(1, (-1, self.head_dim))
        slots = step.attention[group].slot_mapping
        q = self.ops.rotate_and_store(NewHeads(heads, cos, sin, pages, slots, self.norm, self.is_interleaved))
        return attended(self, step, q, is_last=is_last).unsqueeze(0)


@dataclass(eq=False)
class HeadsFirst(AttendingStep):
    """Runs `Attention` for queries [1, heads, num_tokens, size] or [heads, num_tokens, size], perhaps in float32.

    Its results are [1, heads, num_tokens, size] if `has_batch`, else [heads, num_tokens, size].
    """

    attention: Attention
    has_batch: bool

    def __call__(
        self, step: StepContext, query: Tensor, key: Tensor, value: Tensor, *, is_last: bool = False
    ) -> Tensor:
        query = query if query.dim() == 4 else query.unsqueeze(0)
        query = query if query.dtype == key.dtype else query.to(key.dtype)
        out = self.attention(step, query, key, value, is_last=is_last).transpose(1, 2)
        return out if self.has_batch else out[0]


@dataclass(eq=False)
class RotatedHeadsFirst(AttendingStep):
    """Runs `RotatedAttention`, with results as those of `HeadsFirst`."""

    attention: RotatedAttention
    has_batch: bool

    def __call__(
        self, step: StepContext, projected: Tensor, cos: Tensor, sin: Tensor, *, is_last: bool = False
    ) -> Tensor:
        out = self.attention(step, projected, cos, sin, is_last=is_last).transpose(1, 2)
        return out if self.has_batch else out[0]


def attended(layer: Attention | RotatedAttention, step: StepContext, q: Tensor, *, is_last: bool) -> Tensor:
    """Attends from `q` [num_tokens, heads, size], or from the wanted tokens among them."""
    pages, group = step.caches[layer.number]
    own: StepContext | Wanted = step
    if is_last:
        assert step.wanted is not None
        own = step.wanted
        q = layer.ops.take_rows(q.flatten(1), own.tokens).unflatten(1, q.shape[1:])
    return layer.sequences.attend(layer.ops, q, pages, own, group, layer.form, layer.num_kv_heads)


class _Form(NamedTuple):
    """The operations on heads before attention.

    Attributes:
        source: a projection of all heads.
        factor: multiplies queries.
    """

    source: int
    rotary: RotaryForm
    factor: float
    norm: tuple[Tensor, float] | None


def fuse_heads(program: Program, ops: Backend, positions: Positions, device: torch.device) -> None:
    """Puts rotation and attention where they compute the same as the class."""
    rotations = Rotations(program, ops, device)
    for call in list(program.calls):
        heads_first = call.function if isinstance(call.function, HeadsFirst) else None
        layer = call.function if heads_first is None else heads_first.attention
        if not isinstance(layer, Attention):
            continue
        form = _read_form(program, call, layer.head_dim, positions)
        if form is None:
            for ref in call.args[:2]:
                rotations.fuse(ref.index, positions)
            continue
        attention_form = layer.form._replace(scale=layer.form.scale * form.factor)
        rotated = RotatedAttention(
            ops, layer.number, attention_form, layer.head_dim, layer.num_kv_heads, layer.sequences, form.norm,
            form.rotary.is_interleaved,
        )  # fmt: skip
        call.function = rotated if heads_first is None else RotatedHeadsFirst(rotated, heads_first.has_batch)
        call.args = (Ref(form.source), *rotations.arguments(form.rotary, program.metas[form.source].dtype))
    rotations.insert()
    program.drop_unused()


def _read_form(program: Program, call: Call, cache_dim: int, positions: Positions) -> _Form | None:
    """Reads the form of the heads that enter a call of attention; None if it is none of ours."""
    sizes = [program.metas[ref.index].shape for ref in call.args]
    if any(len(size) != 4 for size in sizes):
        return None
    head_dim, num_heads, num_kv_heads = sizes[0][3], sizes[0][1], sizes[1][1]
    if any(size[3] != head_dim for size in sizes) or cache_dim != head_dim:
        return None
    calls, starts = program.slice_to([ref.index for ref in call.args], is_layer)
    starts.discard(positions.input)
    num_all = num_heads + 2 * num_kv_heads
    if len(starts) != 1 or program.metas[min(starts)].shape[-1] != num_all * head_dim:
        return None
    [source] = starts
    projected = examples(1, len(positions.compared), num_all * head_dim)
    values = positions.computed(calls, {source: projected})
    if values is None:
        return None
    q, k, v = (values[ref.index][0].transpose(0, 1) for ref in call.args)
    qk, expected_v = projected[0].unflatten(1, (-1, head_dim)).split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if not agree(v, expected_v):
        return None
    norm = _read_norm(program, call, calls, num_heads, num_kv_heads)
    if norm is not None:
        weight, eps = norm
        qk = qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + eps) * weight.cpu().float()
    factor = ratio(q, qk[:, :num_heads]) / ratio(k, qk[:, num_heads:])
    factor = factor if abs(factor - 1) > 1e-5 else 1.0
    rotary = read_rotary_form(torch.cat((q / factor, k), dim=1), qk, calls, positions.compared)
    return None if rotary is None else _Form(source, rotary, factor, norm)


def _read_norm(
    program: Program, call: Call, calls: Sequence[Call], num_heads: int, num_kv_heads: int
) -> tuple[Tensor, float] | None:
    """Returns the weights of the norms of queries and keys, [num_heads + num_kv_heads, size], and their eps."""
    norms = []
    for ref, count in zip(call.args[:2], (num_heads, num_kv_heads), strict=True):
        own, _ = program.slice_to([ref.index], is_layer)
        found = [each.function for each in own if isinstance(each.function, layer_modules.RMSNorm)]
        if len(found) != 1 or len(found[0].weight) != program.metas[ref.index].shape[3]:
            return None
        norms.append((found[0], count))
    (q_norm, _), (k_norm, _) = norms
    if q_norm.eps != k_norm.eps or q_norm.weight.dtype != k_norm.weight.dtype:
        return None
    return torch.cat([norm.weight.expand(count, -1) for norm, count in norms]), q_norm.eps


def _padded(x: Tensor, head_dim: int) -> Tensor:
    """Pads each head of `x` [num_tokens, heads, size] with zeros, which change no score."""
    return x if x.shape[2] == head_dim else F.pad(x, (0, head_dim - x.shape[2]))
