"""Computes a class's multi-head latent attention (arXiv:2405.04434, section 2.1) in the latent space.

The class expands a token's latent into the keys and values of all heads by one linear layer, and appends one shared key
to each head's key. The cache holds only the latent and the shared key. The expansion is applied to queries and outputs
instead, as in `quire.executor.layers.attention.latent`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.executor.layers.attention.layer_kv import LatentKV
from quire.executor.layers.step_context import StepContext, Wanted
from quire.executor.models.transformers import layer_modules
from quire.executor.models.transformers.programs.evaluation import agree, examples, is_layer
from quire.executor.models.transformers.programs.program import AttendingStep, Call, Program, Ref
from quire.executor.models.transformers.programs.rotation import (
    Positions,
    RotaryForm,
    Rotations,
    paired,
    ratio,
    read_rotary_form,
)
from quire.executor.parallel.context.strategy import ContextParallel
from quire.ops.backend import Backend
from quire.ops.latent import NewLatents


@dataclass(eq=False)
class LatentAttention(AttendingStep):
    """Attends from `query` [1, heads, num_tokens, size] to latents [1, num_tokens, rank], shared key [1, 1, num_tokens,
    rest].

    Returns [1, num_tokens, heads, size of values]. The last `rest` elements of a head's query meet the shared key, the
    others the key that is expanded from the latent.
    """

    ops: Backend
    number: int  # of the layer's cache
    scale: float
    expansion: layer_modules.Expansion
    sequences: ContextParallel

    @property
    def kv(self) -> LatentKV:
        """The layer's cached rows."""
        return LatentKV((self.expansion.latent.rank, self.expansion.shared_size))

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Selects this operation's arguments from those of the class's attention call; its values are zeros."""
        shared = key[:, :1, :, key.shape[3] - self.expansion.shared_size :]
        return query, self.expansion.take(), shared

    def __call__(
        self, step: StepContext, query: Tensor, latents: Tensor, shared: Tensor, *, is_last: bool = False
    ) -> Tensor:
        pages, group = step.caches[self.number]
        rows = torch.cat((latents.reshape(len(step.positions), -1), shared[0, 0]), dim=-1)
        self.kv.store(self.ops, rows, pages, step.attention[group].slot_mapping)
        q, rest = query[0].transpose(0, 1).split((query.shape[3] - shared.shape[3], shared.shape[3]), dim=2)
        return attended(self, step, q, rest.contiguous(), is_last=is_last)


@dataclass(eq=False)
class RotatedLatentAttention(AttendingStep):
    """Attends from projections [1, num_tokens, heads * size], [1, num_tokens, rank + rest], cosines and sines."""

    ops: Backend
    number: int
    scale: float
    expansion: layer_modules.Expansion
    sequences: ContextParallel
    norm: tuple[Tensor, float]
    is_interleaved: bool

    def __call__(
        self, step: StepContext, projected: Tensor, latents: Tensor, cos: Tensor, sin: Tensor, *, is_last: bool = False
    ) -> Tensor:
        pages, group = step.caches[self.number]
        num_heads, nope_head_dim = self.expansion.latent.to_latent.shape[:2]
        q = projected[0].unflatten(1, (num_heads, -1))
        rotated = self.ops.latent.rotate_and_store_latent(NewLatents(
            q[..., nope_head_dim:], latents[0], self.norm, cos, sin, pages, step.attention[group].slot_mapping,
            is_interleaved=self.is_interleaved,
        ))  # fmt: skip
        return attended(self, step, q[..., :nope_head_dim], rotated, is_last=is_last)


def attended(
    layer: LatentAttention | RotatedLatentAttention, step: StepContext, q: Tensor, rest: Tensor, *, is_last: bool
) -> Tensor:
    """Attends from `q` [num_tokens, heads, size] and `rest`, the part for the shared key, to rows that are stored.

    Returns [1, num_tokens, heads, size of values], or only those of the wanted tokens.
    """
    pages, group = step.caches[layer.number]
    expansion = layer.expansion.latent
    own: StepContext | Wanted = step
    if is_last:
        assert step.wanted is not None
        own = step.wanted
        q, rest = (layer.ops.take_rows(x.flatten(1), own.tokens).unflatten(1, x.shape[1:]) for x in (q, rest))
    q_latent = expansion.on_queries(q)
    out = layer.sequences.attend_to_latents(layer.ops, q_latent, rest, pages, own, group, scale=layer.scale)
    return expansion.on_outputs(out).unsqueeze(0)


# --------------------------------------------------------------------------------------------------------- dry runs


class Expansion(NamedTuple):
    """The layer that expands latents into keys and values, and the size of the key in a head's outputs."""

    linear: nn.Module
    nope_head_dim: int

    def split(self, expanded: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        """Splits its outputs for one sequence into all heads' keys and values [heads, num_tokens, size]."""
        heads = expanded.reshape(-1, num_heads, expanded.shape[-1] // num_heads).transpose(0, 1)
        keys, values = heads.tensor_split((self.nope_head_dim,), dim=2)
        return keys, values


def find_expansion(outputs: Sequence[tuple[nn.Module, Tensor]], key: Tensor, value: Tensor) -> Expansion | None:
    """Finds the layer that computed a class's `key` and `value` [1, heads, num_tokens, size] in latent attention.

    Args:
        outputs: linear layers of the class's attention, with their outputs in the dry run.
    """
    _, num_heads, num_tokens, value_dim = value.shape
    for linear, expanded in outputs:
        size = expanded.shape[-1] // num_heads
        expansion = Expansion(linear, size - value_dim)
        is_fit = expanded.numel() == num_tokens * num_heads * size and 0 < size - value_dim < key.shape[3]
        if not is_fit or not isinstance(linear, nn.Linear) or linear._parameters.get("bias") is not None:
            continue
        keys, values = expansion.split(expanded, num_heads)
        own, shared = key[0].tensor_split((expansion.nope_head_dim,), dim=2)
        is_shared = torch.equal(shared, shared[:1].expand_as(shared))
        if is_shared and torch.equal(own, keys) and torch.equal(value[0], values):
            return expansion
    return None


# ---------------------------------------------------------------------------------------------------------- programs


class _Form(NamedTuple):
    """The operations on queries, latents and shared keys before attention.

    Attributes:
        queries: a projection of all heads.
        latents: a projection to latents and shared keys.
        factor: multiplies queries.
    """

    queries: int
    latents: int
    rotary: RotaryForm
    factor: float
    norm: tuple[Tensor, float]


def fuse_latents(program: Program, ops: Backend, positions: Positions, device: torch.device) -> None:
    """Puts norm, rotation and attention where they compute the same as the class; see `heads.fuse_heads`."""
    rotations = Rotations(program, ops, device)
    for call in list(program.calls):
        layer = call.function
        if not isinstance(layer, LatentAttention):
            continue
        form = _read_form(program, call, layer.expansion, positions)
        if form is None:
            continue
        call.function = RotatedLatentAttention(
            ops, layer.number, layer.scale * form.factor, layer.expansion, layer.sequences, form.norm,
            form.rotary.is_interleaved,
        )  # fmt: skip
        rotary = rotations.arguments(form.rotary, program.metas[form.queries].dtype)
        call.args = (Ref(form.queries), Ref(form.latents), *rotary)
    rotations.insert()
    program.drop_unused()


def _read_form(program: Program, call: Call, expansion: layer_modules.Expansion, positions: Positions) -> _Form | None:
    """Reads the form of a call's inputs; None if it is none of ours."""
    query, latents, shared = (ref.index for ref in call.args)
    _, num_heads, _, head_dim = program.metas[query].shape
    rank, width = expansion.latent.rank, expansion.latent.rank + expansion.shared_size

    def stops(each: Call) -> bool:
        is_projection = any(out is not None and program.metas[out].shape[-1:] == (width,) for out in each.outs)
        return is_layer(each) or (is_projection and each.is_single and program.is_hidden(Ref(each.outs[0])))  # type: ignore[arg-type]

    calls, starts = program.slice_to([query, latents, shared], stops)
    made = program.producers()
    sources = [each for each in starts - {positions.input} if not _is_zeros(made.get(each))]
    sizes = {program.metas[each].shape[-1]: each for each in sources}
    norms = [each.function for each in calls if isinstance(each.function, layer_modules.RMSNorm)]
    is_fit = len(sources) == 2 and sizes.keys() == {num_heads * head_dim, width}
    if not is_fit or len(norms) != 1 or len(norms[0].weight) != rank:
        return None
    given = {each: torch.zeros(1, len(positions.compared), program.metas[each].shape[-1]) for each in starts}
    given |= {start: examples(1, len(positions.compared), size).roll(size, -1) for size, start in sizes.items()}
    values = positions.computed(calls, given)
    if values is None:
        return None
    x, q = given[sizes[num_heads * head_dim]][0].unflatten(1, (num_heads, -1)), values[query][0].transpose(0, 1)
    row = given[sizes[width]][0]
    nope_head_dim = head_dim - expansion.shared_size
    factor = ratio(q[..., :nope_head_dim], x[..., :nope_head_dim])
    [norm] = norms
    normed = norm.in_float32(row[:, :rank])
    stretch = ratio(values[latents].reshape(normed.shape), normed)
    if not agree(q[..., :nope_head_dim], x[..., :nope_head_dim] * factor):
        return None
    if not agree(values[latents].reshape(normed.shape), normed * stretch):
        return None
    got = torch.cat((q[..., nope_head_dim:] / factor, values[shared][0].transpose(0, 1)), dim=1)
    rotary = _read_rotary_form(
        got, torch.cat((x[..., nope_head_dim:], row[:, None, rank:]), dim=1), calls, positions.compared
    )
    if rotary is None:
        return None
    weight = norm.weight if abs(stretch - 1) < 1e-5 else norm.weight.float() * stretch
    factor = factor if abs(factor - 1) > 1e-5 else 1.0
    return _Form(sizes[num_heads * head_dim], sizes[width], rotary, factor, (weight, norm.eps))


def _is_zeros(call: Call | None) -> bool:
    return call is not None and isinstance(call.function, layer_modules.Expansion)


def _read_rotary_form(got: Tensor, x: Tensor, calls: Sequence[Call], positions: Sequence[int]) -> RotaryForm | None:
    """Reads the rotation. Pairs may come out as (i, i + size / 2), because queries meet keys in no other place."""
    rotary = read_rotary_form(got, x, calls, positions)
    if rotary is None:
        rotary = read_rotary_form(got, paired(x, x.shape[2] // 2), calls, positions)
        return None if rotary is None or rotary.is_interleaved else rotary._replace(is_interleaved=True)
    return rotary
