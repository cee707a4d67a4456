"""Recognizes the experts of a mixture by what they compute, and reads their weights for our operation."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.experts import Experts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import FusedExperts, SeparateExperts
from quire.executor.models.transformers.programs.evaluation import agree, examples
from quire.executor.weights.quantization.formats.gguf import Gguf
from quire.executor.weights.readers import Shard, Stored, StoredRows
from quire.ops.activations import Activation, PlainActivation
from quire.ops.backend import Backend

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_NUM_TOKENS, _HIDDEN, _SIZE = 5, 8, 6
"""Sizes of the small copy that is compared."""


class ExpertsForm(NamedTuple):
    """The storage of a module's experts (see `FusedExperts`), and the activation between their layers."""

    shape: ExpertShape
    is_transposed: bool
    is_interleaved: bool
    has_bias: bool
    activation: Activation


_ACTIVATIONS: tuple[Activation, ...] = (*get_args(PlainActivation), "clamped_swiglu", "clamped_silu")


def read_experts(module: nn.Module, ops: Backend) -> ExpertsForm | None:
    """Returns the form of a module `(x, ids, weights) → weighted sum of each token's experts`; None for others."""
    sizes = {name: tuple(value.shape) for name, value in module._parameters.items() if value is not None}
    biases = {f"{GATE_UP}_bias", f"{DOWN}_bias"}
    has_bias = biases <= set(sizes)
    if set(sizes) != {GATE_UP, DOWN, *(biases if has_bias else ())} or len(sizes[GATE_UP]) != 3:
        return None
    num_experts, first, last = sizes[GATE_UP]
    for is_transposed in (False, True):
        double, hidden_size = (last, first) if is_transposed else (first, last)
        shape = ExpertShape(num_experts, hidden_size, double // 2)
        down = (shape.size, hidden_size) if is_transposed else (hidden_size, shape.size)
        if double % 2 or sizes[DOWN] != (num_experts, *down):
            continue
        for is_interleaved, activation in product((False, True), _ACTIVATIONS):
            form = ExpertsForm(shape, is_transposed, is_interleaved, has_bias, activation)
            if all(_computes(module, form, ops, scale) for scale in (0.3, 4)):
                return form
    return None


def _computes(module: nn.Module, form: ExpertsForm, ops: Backend, scale: float) -> bool:
    """Returns True if a small copy of `module` computes the form's formula, with inputs up to `scale`."""
    num_experts, hidden_size, size = form.shape
    small_size = _HIDDEN if size == hidden_size else _SIZE
    gate_up = examples(num_experts, 2 * small_size, _HIDDEN) * 2
    down = examples(num_experts, _HIDDEN, small_size)
    weights = {GATE_UP: gate_up, DOWN: down}
    if form.is_transposed:
        weights = {name: weight.mT.contiguous() for name, weight in weights.items()}
    gate_up_bias, down_bias = examples(num_experts, 2 * small_size), examples(num_experts, _HIDDEN)
    if form.has_bias:
        weights |= {f"{GATE_UP}_bias": gate_up_bias, f"{DOWN}_bias": down_bias}
    small = _small(module, weights, {hidden_size: _HIDDEN, size: small_size, 2 * size: 2 * small_size})
    x, shares = examples(_NUM_TOKENS, _HIDDEN) * scale, examples(_NUM_TOKENS, 2)
    ids = torch.tensor([[i % num_experts, (3 * i + 1) % num_experts] for i in range(_NUM_TOKENS)])
    try:
        got = small(x, ids, shares)
    except Exception:  # the module's code may raise anything for these inputs
        return False
    inner = torch.einsum("td,tkod->tko", x, gate_up[ids]) + (gate_up_bias[ids] if form.has_bias else 0)
    if form.is_interleaved:
        inner = torch.cat((inner[..., ::2], inner[..., 1::2]), dim=-1)
    gated = ops.activate_and_mul(inner.flatten(0, 1), form.activation).unflatten(0, inner.shape[:2])
    outs = torch.einsum("tki,tkoi->tko", gated, down[ids]) + (down_bias[ids] if form.has_bias else 0)
    return isinstance(got, Tensor) and agree(got, (outs * shares.unsqueeze(-1)).sum(1))


def _small(module: nn.Module, weights: Mapping[str, Tensor], sizes: Mapping[int, int]) -> nn.Module:
    """Copies the module with other weights, and with its stored sizes mapped by `sizes`."""
    twin = copy.copy(module)
    own = {
        name: sizes.get(value, value) if type(value) is int and "expert" not in name else value
        for name, value in vars(module).items()
    }
    parameters = {name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
    twin.__dict__ = {**own, "_parameters": parameters}
    return twin


def load_experts(context: ModelContext, name: str, form: ExpertsForm, top_k: int) -> Experts:
    """Builds the experts of the module `name`. GGUF files have a stack for each layer, whose members are read."""
    if isinstance(context.scheme, Gguf) and not form.is_interleaved and not form.has_bias:
        return Experts(context, SeparateExperts(f"{name}.{{}}"), form.shape, top_k, form.activation)
    stored = FusedExperts(
        f"{name}.{GATE_UP}",
        f"{name}.{DOWN}",
        is_transposed=form.is_transposed,
        is_interleaved=form.is_interleaved,
        has_bias=form.has_bias,
    )
    # A tensor that is converted from several stored ones is converted once for all experts.
    held = replace(context, weights=_Held(context, _own_rows(context, form.shape.num_experts)))
    return Experts(held, stored, form.shape, top_k, form.activation)


def _own_rows(context: ModelContext, num_experts: int) -> Shard:
    """Returns the range of experts from this rank's first to its last one."""
    own: Sequence[int] = range(num_experts)
    if context.experts is not None:
        own = context.experts.place(num_experts, context.device).own or [0]
    return Shard(0, min(own), max(own) + 1)


class _Held:
    """Reads the wanted `rows` of each tensor of one module once, when the first of them is asked for."""

    shapes = None

    def __init__(self, context: ModelContext, rows: Shard) -> None:
        self._context = context
        self._rows = rows
        self._tensors: dict[str, Tensor] = {}

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._context.weights.read(name, shape, self._rows, dtype)
        assert shard is not None, "experts are read one by one"
        return self._tensors[name][shard.start - self._rows.start : shard.stop - self._rows.start]

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        return self._context.weights.find(name, otherwise)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return StoredRows(self, layer, out_features)

    def are_same(self, name: str, other: str) -> bool:
        return self._context.weights.are_same(name, other)

    def close(self) -> None:
        """Does nothing: the owner of the inner reader closes it."""
