"""Mixture of experts with the kernels of `kernels/experts.cpp` and `kernels/routing.cpp`."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from quire.ops.backend import Activation, ExpertWeights, Int8Weight, LinearWeight
from quire.ops.cpu import calls
from quire.ops.cpu.calls import ACTIVATIONS, DTYPES
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.launches import Launcher
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.experts import GroupedExperts
from quire.ops.routing import Router


@dataclass(frozen=True)
class ExpertLinear:
    """One linear layer of all experts.

    Attributes:
        panels: [num_experts, numbers of a packed weight], of the weights' dtype.
        scales: [num_experts, out] float32, if a number of the weight is one byte.
        bias: [num_experts, out] float32.
    """

    panels: Tensor
    scales: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class ExpertPanels:
    """All experts of a layer; `size` is the intermediate one."""

    gate_up: ExpertLinear
    down: ExpertLinear
    hidden_size: int
    size: int

    @property
    def bytes_each(self) -> int:
        """Bytes of one expert's weights."""
        return sum(layer.panels[0].numel() * layer.panels.itemsize for layer in (self.gate_up, self.down))


PackedExperts = ExpertPanels | GroupedExperts


class NativeExperts:
    """Operations of `Backend`; a token's result has the same bits in any batch."""

    def __init__(
        self, kernels: ctypes.CDLL, launcher: Launcher, eager: EagerBackend[Any], fallbacks: Fallbacks
    ) -> None:
        """`kernels` comes from `quire.ops.cpu.compiler`; `eager` takes what the kernels do not cover."""
        self._eager = eager
        self._fallbacks = fallbacks
        self._empty = launcher.empty
        self._size = kernels["quire_expert_size"]
        self._size.argtypes = [ctypes.c_long] * 4
        self._size.restype = ctypes.c_long
        self._pack = launcher.bind(calls.PACK_EXPERT)
        self._experts = launcher.bind(calls.EXPERTS)
        self._route = launcher.bind(calls.ROUTE)

    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        """See `Backend.route`."""
        routing, weight = router.routing, router.weight
        given = [tensor for tensor in (weight, router.bias, router.correction) if tensor is not None]
        is_covered = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in given)
        if is_covered and x.dtype in DTYPES and x.stride(1) == 1:
            ids = self._empty(len(x), routing.top_k, dtype=torch.int64)
            weights = self._empty(len(x), routing.top_k, dtype=torch.float32)
            if not self._route(
                x.data_ptr(), weight.data_ptr(), _address(router.bias), _address(router.correction), ids.data_ptr(),
                weights.data_ptr(), len(x), x.stride(0), weight.shape[1], len(weight), routing.top_k,
                routing.score == "sigmoid", routing.renormalise, routing.num_groups, routing.top_groups,
                routing.group_best, DTYPES[x.dtype], torch.get_num_threads(), routing.floor, routing.scale,
            ):  # fmt: skip
                return ids, weights
        return self._fallbacks.run(self._eager.route, x, router)

    def pack(self, experts: Iterable[ExpertWeights], num_experts: int) -> PackedExperts:
        """See `Backend.pack_experts`."""
        packed: ExpertPanels | None = None
        rest = iter(experts)
        for index, expert in enumerate(rest):
            if packed is None:
                packed = self._empty_panels(expert, num_experts)
                if packed is None:
                    return self._eager.pack_experts(chain([expert], rest), num_experts)
            self._store(packed.gate_up, index, expert.gate_up, expert.gate_up_bias, is_gated=True)
            self._store(packed.down, index, expert.down, expert.down_bias, is_gated=False)
        return packed or self._eager.pack_experts((), num_experts)

    def run(
        self, x: Tensor, packed: PackedExperts, ids: Tensor, weights: Tensor, activation: Activation = "silu"
    ) -> Tensor:
        """See `Backend.experts`.

        Raises:
            ValueError: `x` has another dtype or shape than the experts take, or an id is none of theirs.
        """
        if isinstance(packed, GroupedExperts):
            return self._fallbacks.run(self._eager.experts, x, packed, ids, weights, activation)
        gate_up, down = packed.gate_up, packed.down
        is_int8 = gate_up.scales is not None
        if (
            x.dtype not in DTYPES
            or (x.dtype != gate_up.panels.dtype and not is_int8)
            or x.shape[1] != packed.hidden_size
        ):
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}; these experts take {gate_up.panels.dtype} [*, {packed.hidden_size}]."
            )
        x = x if x.stride(1) == 1 else x.contiguous()
        ids, weights = ids.contiguous(), weights.contiguous()
        out = self._empty(*x.shape, dtype=x.dtype)
        failed = self._experts(
            x.data_ptr(), gate_up.panels.data_ptr(), down.panels.data_ptr(), _address(gate_up.scales),
            _address(gate_up.bias), _address(down.scales), _address(down.bias), ids.data_ptr(), weights.data_ptr(),
            out.data_ptr(), len(x), x.stride(0), packed.hidden_size, packed.size, len(down.panels), ids.shape[1],
            ACTIVATIONS[activation], DTYPES[x.dtype], is_int8, torch.get_num_threads(),
        )  # fmt: skip
        if failed == 3:
            raise ValueError(f"ids of experts must be from 0 to {len(down.panels) - 1}.")
        if failed == 2:
            raise MemoryError(f"no memory for {ids.shape[1]} experts of {len(x)} tokens")
        if failed:  # a processor that cannot convert float16
            return self.run(x.float(), packed, ids, weights, activation).to(x.dtype)
        return out

    def _empty_panels(self, expert: ExpertWeights, num_experts: int) -> ExpertPanels | None:
        """Memory for experts like this one; None if the kernels do not take their dtype."""
        if _values(expert.down).dtype not in (*DTYPES, torch.int8):
            return None
        hidden_size, size = expert.down.shape
        gate_up = self._empty_layer(expert.gate_up, expert.gate_up_bias, num_experts, is_gated=True)
        down = self._empty_layer(expert.down, expert.down_bias, num_experts, is_gated=False)
        return ExpertPanels(gate_up, down, hidden_size, size) if gate_up and down else None

    def _empty_layer(
        self, weight: LinearWeight, bias: Tensor | None, num_experts: int, *, is_gated: bool
    ) -> ExpertLinear | None:
        values = _values(weight)
        size = self._size(*weight.shape, is_gated, DTYPES.get(values.dtype, 0))
        if not size:
            return None
        rows = (num_experts, weight.shape[0])
        scales = values.new_empty(rows, dtype=torch.float32) if isinstance(weight, Int8Weight) else None
        biases = None if bias is None else values.new_empty(rows, dtype=torch.float32)
        return ExpertLinear(values.new_empty(num_experts, size), scales, biases)

    def _store(
        self, layer: ExpertLinear, index: int, weight: LinearWeight, bias: Tensor | None, *, is_gated: bool
    ) -> None:
        values = _values(weight).contiguous()
        if not values.is_meta:
            self._pack(
                values.data_ptr(), layer.panels[index].data_ptr(), *values.shape, is_gated,
                DTYPES.get(values.dtype, 0), values.dtype == torch.int8, torch.get_num_threads(),
            )  # fmt: skip
        if layer.scales is not None and isinstance(weight, Int8Weight):
            layer.scales[index] = weight.scales
        if layer.bias is not None and bias is not None:
            layer.bias[index] = bias


def _values(weight: LinearWeight) -> Tensor:
    return weight.values if isinstance(weight, Int8Weight) else weight


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
