"""Mixture of experts with the kernels of `kernels/experts.cpp` and `kernels/routing.cpp`."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from quire.ops.backend import Activation, ExpertWeights
from quire.ops.cpu import calls
from quire.ops.cpu.activation_bits import ActivationBits
from quire.ops.cpu.calls import ACTIVATIONS, DTYPES
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.launches import Launcher
from quire.ops.cpu.widened import Encoded, Panels, address
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.experts import GroupedExperts
from quire.ops.quantised import QuantisedWeight
from quire.ops.routing import SCORES, Router


@dataclass(frozen=True)
class ExpertLinear:
    """One linear layer of all experts.

    Attributes:
        panels: [num_experts, bytes of a packed weight] uint8.
        form: `WeightForm` in `kernels/kernels.h`.
        order: [num_experts, in] int64; None: the inputs are in order.
        bias: [num_experts, out] float32.
    """

    panels: Tensor
    form: tuple[int, ...]
    order: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class ExpertPanels:
    """All experts of a layer; `size` is the intermediate one.

    Attributes:
        dtype: of `x`; None: any float type.
        table: as `Coded` has it, for both layers.
        codec: one of `CodecNumber` in `kernels/codecs.h`, for both layers.
        has_byte_inputs: as `QuantisedWeight` has it; of both layers.
    """

    gate_up: ExpertLinear
    down: ExpertLinear
    hidden_size: int
    size: int
    dtype: torch.dtype | None
    table: Tensor | None
    codec: int
    has_byte_inputs: bool

    @property
    def bytes_each(self) -> int:
        """Bytes of one expert's weights."""
        return sum(layer.panels[0].numel() for layer in (self.gate_up, self.down))


PackedExperts = ExpertPanels | GroupedExperts


class NativeExperts:
    """Operations of `Backend`; a token's result has the same bits in any batch."""

    def __init__(
        self, panels: Panels, launcher: Launcher, bits: ActivationBits, eager: EagerBackend[Any], fallbacks: Fallbacks
    ) -> None:
        """`panels` packs weights, `bits` says what becomes of `x`; `eager` takes what the kernels do not cover."""
        self._panels = panels
        self._bits = bits
        self._eager = eager
        self._fallbacks = fallbacks
        self._empty = launcher.empty
        self._experts = launcher.bind(calls.EXPERTS)
        self._route = launcher.bind(calls.ROUTE)

    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        """See `Backend.route`."""
        routing, weight = router.routing, router.weight
        given = [tensor for tensor in (weight, router.bias, router.correction, router.shares) if tensor is not None]
        is_covered = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in given)
        if is_covered and x.dtype in DTYPES and x.stride(1) == 1:
            ids = self._empty(len(x), routing.top_k, dtype=torch.int64)
            weights = self._empty(len(x), routing.top_k, dtype=torch.float32)
            if not self._route(
                x.data_ptr(), weight.data_ptr(), address(router.bias), address(router.correction),
                address(router.shares), ids.data_ptr(), weights.data_ptr(), len(x), x.stride(0), weight.shape[1],
                len(weight), routing.top_k, SCORES.index(routing.score), routing.renormalise, routing.num_groups,
                routing.top_groups, routing.group_best, DTYPES[x.dtype], torch.get_num_threads(), routing.floor,
                routing.scale, routing.distance,
            ):  # fmt: skip
                return ids, weights
        return self._fallbacks.run(self._eager.route, x, router)

    def pack(self, experts: Iterable[ExpertWeights], num_experts: int) -> PackedExperts:
        """See `Backend.pack_experts`."""
        packed: ExpertPanels | None = None
        rest = iter(experts)
        for index, expert in enumerate(rest):
            layers = self._encode(expert)
            if packed is None:
                if layers is None:
                    if isinstance(expert.down, QuantisedWeight):
                        self._fallbacks.say_of_quantised(expert.down)
                    return self._eager.pack_experts(chain([expert], rest), num_experts)
                packed = _empty_panels(expert, num_experts, *layers)
                is_dry = packed.down.panels.is_meta
                self._bits.say(packed.codec, has_byte_inputs=packed.has_byte_inputs, is_dry=is_dry)
            assert layers is not None, "all experts have the same shapes"
            for layer, encoded, bias in (
                (packed.gate_up, layers[0], expert.gate_up_bias),
                (packed.down, layers[1], expert.down_bias),
            ):
                self._panels.pack(encoded.coded, encoded.form, layer.panels[index])
                if layer.order is not None and encoded.coded.order is not None:
                    layer.order[index] = encoded.coded.order
                if layer.bias is not None and bias is not None:
                    layer.bias[index] = bias
        return packed or self._eager.pack_experts((), num_experts)

    def tensors(self, packed: PackedExperts, index: int) -> list[Tensor]:
        """See `Backend.expert_tensors`."""
        if isinstance(packed, GroupedExperts):
            return self._eager.expert_tensors(packed, index)
        parts = [part for each in (packed.gate_up, packed.down) for part in (each.panels, each.order, each.bias)]
        return [part[index] for part in parts if part is not None]

    def run(
        self,
        x: Tensor,
        packed: PackedExperts,
        ids: Tensor,
        weights: Tensor,
        activation: Activation = "silu",
        *,
        weighs_inputs: bool = False,
    ) -> Tensor:
        """See `Backend.experts`.

        Raises:
            ValueError: `x` has another dtype or shape than the experts take, or an id is none of theirs.
        """
        if isinstance(packed, GroupedExperts):
            return self._fallbacks.run(
                self._eager.experts, x, packed, ids, weights, activation, weighs_inputs=weighs_inputs
            )
        gate_up, down = packed.gate_up, packed.down
        if x.dtype not in DTYPES or x.dtype != (packed.dtype or x.dtype) or x.shape[1] != packed.hidden_size:
            takes = packed.dtype or "floats"
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; these experts take {takes} [*, {packed.hidden_size}].")
        x = x if x.stride(1) == 1 else x.contiguous()
        ids, weights = ids.contiguous(), weights.contiguous()
        out = self._empty(*x.shape, dtype=x.dtype)
        failed = self._experts(
            x.data_ptr(), gate_up.panels.data_ptr(), down.panels.data_ptr(), address(packed.table),
            address(gate_up.order), address(down.order), address(gate_up.bias), address(down.bias), ids.data_ptr(),
            weights.data_ptr(), out.data_ptr(), len(x), x.stride(0), packed.hidden_size, packed.size,
            len(down.panels), ids.shape[1], ACTIVATIONS[activation], *gate_up.form, *down.form, DTYPES[x.dtype],
            self._bits.of(x.dtype, packed.codec, has_byte_inputs=packed.has_byte_inputs), weighs_inputs,
            torch.get_num_threads(),
        )  # fmt: skip
        if failed == 3:
            raise ValueError(f"ids of experts must be from 0 to {len(down.panels) - 1}, or -1.")
        if failed == 2:
            raise MemoryError(f"no memory for {ids.shape[1]} experts of {len(x)} tokens")
        if failed:  # a processor that cannot convert float16
            return self.run(x.float(), packed, ids, weights, activation, weighs_inputs=weighs_inputs).to(x.dtype)
        return out

    def _encode(self, expert: ExpertWeights) -> tuple[Encoded, Encoded] | None:
        """Both weights for the kernel; None if it does not take them."""
        gate_up = self._panels.encode(expert.gate_up, is_gated=expert.is_gated)
        down = self._panels.encode(expert.down, is_gated=False)
        if gate_up is None or down is None or not gate_up.coded.has_values_of(down.coded):
            return None
        return gate_up, down


def _empty_panels(expert: ExpertWeights, num_experts: int, gate_up: Encoded, down: Encoded) -> ExpertPanels:
    """Memory for experts like this one."""

    def layer(encoded: Encoded, bias: Tensor | None) -> ExpertLinear:
        codes, order = encoded.coded.codes, encoded.coded.order
        return ExpertLinear(
            codes.new_empty(num_experts, encoded.num_bytes, dtype=torch.uint8),
            encoded.form,
            None if order is None else order.new_empty(num_experts, len(order)),
            None if bias is None else codes.new_empty(num_experts, encoded.coded.shape[0], dtype=torch.float32),
        )

    dtype = expert.down.dtype if isinstance(expert.down, Tensor) else None
    hidden_size, size = expert.down.shape
    layers = layer(gate_up, expert.gate_up_bias), layer(down, expert.down_bias)
    has_byte_inputs = gate_up.coded.has_byte_inputs and down.coded.has_byte_inputs
    return ExpertPanels(*layers, hidden_size, size, dtype, gate_up.coded.table, gate_up.coded.codec, has_byte_inputs)
