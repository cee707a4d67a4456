"""Mixture of experts in plain torch: tokens are sorted by expert, and each layer is one grouped product."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.eager.low_rank import add_low_rank
from quire.ops.eager.quantized import PART
from quire.ops.experts import ExpertCall, ExpertWeights, alike
from quire.ops.linear import LinearWeight, LowRankWeights
from quire.ops.quantized import QuantizedWeight, dequantize

_ALIGNMENT = 16
"""The grouped product takes rows of a multiple of this many bytes."""


@dataclass(frozen=True)
class GroupedLinear:
    """One linear layer of all experts. Elements past the ends of its outputs and inputs are zero.

    Attributes:
        weight: [num_experts, out, in]; or the experts' quantized weights, without such elements: each tensor has one
            more dimension in front, the experts', except for the table, which they share.
        bias: [num_experts, out].
        shape: (out, in).
        places: the rows of an expert's own weight, and the row of `weight` where they begin.
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    shape: tuple[int, int]
    places: tuple[tuple[slice, int], ...]

    @classmethod
    def empty(
        cls,
        weight: LinearWeight,
        bias: Tensor | None,
        num_experts: int,
        shape: tuple[int, int],
        places: tuple[tuple[slice, int], ...],
    ) -> "GroupedLinear":
        """Allocates the layer for experts whose weights and biases have the form of one expert."""
        zeros: LinearWeight
        if isinstance(weight, Tensor):
            zeros = weight.new_zeros(num_experts, *shape)
        else:
            zeros = weight.checked()._replace(
                **{name: part.new_empty(num_experts, *part.shape) for name, part in _own_tensors(weight).items()}
            )
        return cls(zeros, None if bias is None else bias.new_zeros(num_experts, shape[0]), shape, places)

    def store(self, expert: int, weight: LinearWeight, bias: Tensor | None) -> None:
        """Stores one expert's `weight` and `bias`."""
        if isinstance(weight, QuantizedWeight):
            for name, part in _own_tensors(weight.checked()).items():
                _expert(getattr(self.weight, name), expert).copy_(part)
        else:
            assert isinstance(self.weight, Tensor)
            self._place(weight, self.weight[expert])
        if self.bias is not None and bias is not None:
            for rows, first in self.places:
                part = bias[rows]
                self.bias[expert, first : first + len(part)] = part

    def tensors(self, expert: int) -> list[Tensor]:
        """Returns the memory of one expert."""
        weight = self.weight
        stacked = [weight] if isinstance(weight, Tensor) else list(_own_tensors(weight).values())
        return [_expert(part, expert) for part in (*stacked, self.bias) if part is not None]

    def multiply(self, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """`x` [num_rows, in] → [num_rows, out]; expert e has the rows before row ends[e], and `experts` names them."""
        if isinstance(self.weight, Tensor):
            out = F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
        else:
            out = self._multiply_quantized(x, self.weight, ends, experts)
        return out if self.bias is None else out + self.bias[experts]

    def _multiply_quantized(self, x: Tensor, weight: QuantizedWeight, ends: Tensor, experts: Tensor) -> Tensor:
        """Dequantizes some experts after another.

        Each product has all rows, as only the device knows their places. A host knows them, and skips experts without
        rows.
        """
        out = x.new_zeros(len(x), self.shape[0])
        count = max(1, PART // (self.shape[0] * self.shape[1]))
        known = ends.tolist() if x.device.type == "cpu" else None
        for first in range(0, len(ends), count):
            part = ends[first : first + count]
            if known is not None and known[first + len(part) - 1] == (known[first - 1] if first else 0):
                continue
            dequantized = x.new_zeros(len(part) + 1, *self.shape)  # the first one is for the rows of earlier experts
            for index, numbers in enumerate(dequantized[1:], first):
                self._place(dequantize(_expert_weight(weight, index), x.dtype), numbers)
            before = ends[first - 1 : first] if first else torch.zeros_like(ends[:1])
            products = F.grouped_mm(x, dequantized.transpose(1, 2), offs=torch.cat((before, part)))
            is_here = (experts >= first) & (experts < first + len(part))
            out = torch.where(is_here.unsqueeze(1), products, out)
        return out

    def _place(self, weight: Tensor, to: Tensor) -> None:
        for rows, first in self.places:
            part = weight[rows]
            to[first : first + len(part), : part.shape[1]] = part


def _own_tensors(weight: QuantizedWeight) -> dict[str, Any]:
    """Returns the tensors of a quantized weight that each expert has for itself, by their names."""
    parts = weight._replace(table=None)._asdict().items()
    return {name: part for name, part in parts if isinstance(part, Tensor)}


def _expert(stacked: Tensor, index: int) -> Tensor:
    return stacked.view(torch.uint8)[index].view(stacked.dtype)  # torch indexes no float8


def _expert_weight(stacked: QuantizedWeight, index: int) -> QuantizedWeight:
    parts: dict[str, Any] = {name: _expert(part, index) for name, part in _own_tensors(stacked).items()}
    return stacked._replace(**parts)


@dataclass(frozen=True)
class GroupedExperts:
    """All experts of a layer; `up` as `ExpertWeights` has it."""

    gate_up: GroupedLinear
    up: GroupedLinear | None
    down: GroupedLinear
    hidden_size: int
    is_gated: bool
    num_experts: int


def pack(experts: Iterable[ExpertWeights], num_experts: int) -> GroupedExperts:
    packed: GroupedExperts | None = None
    for index, expert in enumerate(alike(experts)):
        if packed is None:
            packed = _empty(expert, num_experts)
        first_bias, up_bias = expert.biases
        packed.gate_up.store(index, expert.gate_up, first_bias)
        if packed.up is not None and expert.up is not None:
            packed.up.store(index, expert.up, up_bias)
        packed.down.store(index, expert.down, expert.down_bias)
    if packed is None:
        raise ValueError("a layer without experts cannot be packed")
    return packed


def tensors(packed: GroupedExperts, index: int) -> list[Tensor]:
    layers = (packed.gate_up, packed.up, packed.down)
    return [part for layer in layers if layer is not None for part in layer.tensors(index)]


def run(packed: GroupedExperts, call: ExpertCall, activate: Callable[[Tensor], Tensor]) -> Tensor:
    x, ids, weights = call.x, call.ids, call.weights
    num_tokens, top_k = ids.shape
    num_experts = packed.num_experts
    # Rows of experts of other ranks come last, after all ends, and their results are not used.
    experts, order = ids.flatten().masked_fill(ids.flatten() < 0, num_experts).sort(stable=True)
    is_here = (experts < num_experts).unsqueeze(1)
    each = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(experts, each, right=True).to(torch.int32)  # `bincount` would wait for the device
    experts = experts.clamp(max=num_experts - 1)
    padded = F.pad(x, (0, packed.gate_up.shape[1] - x.shape[1]))
    inputs = padded[order // top_k]
    if call.weighs_inputs:
        inputs, weights = (inputs * weights.flatten()[order].unsqueeze(1)).to(x.dtype), torch.ones_like(weights)
    inner = packed.gate_up.multiply(inputs, ends, experts)
    if packed.up is not None:
        inner = torch.cat((inner, packed.up.multiply(inputs, ends, experts)), dim=-1)
    added = call.low_rank
    numbers = experts  # of the low-rank weights of each row
    if added is not None:
        adapters = added.adapters[order // top_k]
        numbers = torch.where(is_here.squeeze(1) & (adapters >= 0), adapters * num_experts + experts, -1)
        _add_low_rank(inputs[:, : x.shape[1]], inner, added.gate_up, numbers)
    inner = activate(inner)
    out = torch.empty(len(order), packed.hidden_size, dtype=torch.float32, device=x.device)
    outputs = packed.down.multiply(inner, ends, experts)
    if added is not None:
        _add_low_rank(inner[:, : added.down.a.shape[2]], outputs, added.down, numbers)
    out[order] = outputs[:, : packed.hidden_size].float().masked_fill(~is_here, 0)
    total, *others = (out.view(num_tokens, top_k, -1) * weights.unsqueeze(-1)).unbind(1)
    for part in others:  # one after the other, so that the sum does not depend on the number of tokens
        total = total + part
    return total.to(x.dtype)


def _add_low_rank(x: Tensor, out: Tensor, weights: LowRankWeights, numbers: Tensor) -> None:
    """Adds the products of `x` with the weights of each row's number to the parts of `out`, which may have padding."""
    count, size = len(weights.sizes), weights.sizes[0]
    parts = out.view(len(out), count, -1)
    if parts.shape[2] == size:
        add_low_rank(x, out, weights, numbers)
    else:
        own = parts[:, :, :size]
        own.copy_(add_low_rank(x, own.flatten(1), weights, numbers).view(own.shape))


def _empty(expert: ExpertWeights, num_experts: int) -> GroupedExperts:
    hidden_size, size = expert.down.shape
    weight = expert.down
    # Dequantized weights have at least two bytes an element.
    unit = _ALIGNMENT // (weight.itemsize if isinstance(weight, Tensor) else 2)
    inner, outer = -(-size // unit) * unit, -(-hidden_size // unit) * unit
    whole = ((slice(None), 0),)
    halves = ((slice(size), 0), (slice(size, None), inner)) if expert.is_gated and expert.up is None else whole
    first_bias, up_bias = expert.biases
    up = None
    if expert.up is not None:
        up = GroupedLinear.empty(expert.up, up_bias, num_experts, (inner, outer), whole)
    return GroupedExperts(
        GroupedLinear.empty(expert.gate_up, first_bias, num_experts, (len(halves) * inner, outer), halves),
        up,
        GroupedLinear.empty(expert.down, expert.down_bias, num_experts, (outer, inner), whole),
        hidden_size,
        expert.is_gated,
        num_experts,
    )
