"""Recognizes modules by what they compute, not by their names: small copies are compared with formulas."""

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.ops.activations import Activation, PlainActivation

_TOLERANCE = 1e-5
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_PLAIN: dict[PlainActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
_NO_ACTIVATIONS = (nn.Identity, nn.Dropout, nn.ModuleList, nn.ModuleDict, nn.Sequential)


class NormForm(NamedTuple):
    """A norm: its epsilon, True if it multiplies by the weight plus 1, and True if it subtracts the mean."""

    eps: float
    is_offset: bool
    is_centred: bool


class GatedForm(NamedTuple):
    """A gated feed-forward network by the names of its linear layers; `gate` is `up` if one layer computes both."""

    gate: str
    up: str
    down: str
    activation: Activation
    is_gate_first: bool  # in a layer that computes both


def read_norm(norm: nn.Module) -> NormForm | None:
    """Returns the form of a norm with one weight and at most a bias; None for another module."""
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    if weight is None or weight.dim() != 1 or set(norm._parameters) - {"weight", "bias"}:
        return None
    if norm._modules or norm._buffers or (bias is not None and bias.shape != weight.shape):
        return None
    if len(inspect.signature(norm.forward).parameters) != 1:
        return None
    numbers = _epsilons(norm)
    if len(numbers) != 1:
        return None
    small = _shallow(norm)
    tensor, x = torch.linspace(0.3, 2.0, len(weight)), _example(3, len(weight)) * 0.01
    shift = None if bias is None else torch.linspace(-1.0, 1.0, len(weight))
    small._parameters = {
        name: nn.Parameter(value, requires_grad=False) if value is not None else None
        for name, value in (("weight", tensor), ("bias", shift))
        if name in norm._parameters
    }
    for is_centred, is_offset in product((False, True), (False, True)):
        y = x - x.mean(-1, keepdim=True) if is_centred else x
        scaled = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + numbers[0]) * (tensor + is_offset)
        if (bias is None or is_centred) and _computes(small, x, scaled if shift is None else scaled + shift):
            return NormForm(numbers[0], is_offset, is_centred)
    return None


def read_plain_norm(norm: nn.Module) -> float | None:
    """Returns the epsilon of a root-mean-square norm without a weight; None for another module."""
    if norm._parameters or norm._modules or norm._buffers or len(inspect.signature(norm.forward).parameters) != 1:
        return None
    numbers = _epsilons(norm)
    x = _example(3, 16) * 0.01
    if len(numbers) != 1 or not _computes(norm, x, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + numbers[0])):
        return None
    return numbers[0]


def read_activation(module: nn.Module) -> PlainActivation | None:
    """Returns the elementwise function of a module, if it is one of ours."""
    if module._parameters or module._modules or module._buffers or type(module) in _NO_ACTIVATIONS:
        return None
    x = torch.linspace(-6, 6, 96).view(3, 32)
    return next((name for name, function in _PLAIN.items() if _computes(module, x, function(x))), None)


def read_gated(network: nn.Module, order: Sequence[str]) -> GatedForm | None:
    """Returns the form of a gated feed-forward network; None for another module.

    Args:
        order: the names of its two or three linear layers in the order of their calls.
    """
    width, size = 8, 12
    small = _shallow(network)
    x = _example(3, width)
    *first, down = order
    outputs = size if len(first) == 2 else 2 * size
    layers = {name: nn.Linear(width, outputs, bias=False) for name in first}
    layers[down] = nn.Linear(size, width, bias=False)
    for index, layer in enumerate(layers.values()):
        layer.weight.data = _example(*layer.weight.shape).roll(index, 0) * width**-0.5
    small._modules = {**small._modules, **layers}
    if len(first) == 2:
        candidates = [(gate, up, True) for gate, up in (first, first[::-1])]
    else:
        candidates = [(first[0], first[0], True), (first[0], first[0], False)]
    for gate, up, is_gate_first in candidates:
        a, b = (layers[gate](x), layers[up](x)) if gate != up else layers[gate](x).chunk(2, dim=-1)
        if not is_gate_first:
            a, b = b, a
        for activation, function in _ACTIVATIONS.items():
            if _computes(small, x, layers[down](function(a) * b)):
                return GatedForm(gate, up, down, activation, is_gate_first)
    return None


def _epsilons(norm: nn.Module) -> list[float]:
    return [value for name, value in vars(norm).items() if "eps" in name and isinstance(value, float)]


def _shallow(module: nn.Module) -> nn.Module:
    """Copies a module so that its parts can be replaced."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    return twin


def _example(rows: int, columns: int) -> Tensor:
    return torch.arange(rows * columns).mul(0.37).sin().view(rows, columns)


def _computes(module: nn.Module, x: Tensor, expected: Tensor) -> bool:
    try:
        got = module(x.unsqueeze(0))
    except Exception:  # the code of another kind of module may raise anything
        return False
    is_alike = isinstance(got, Tensor) and got.shape == (1, *expected.shape)
    return is_alike and torch.allclose(got[0].float(), expected, rtol=_TOLERANCE, atol=_TOLERANCE)
