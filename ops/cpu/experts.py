"""Mixture of experts with the kernels of `kernels/experts.cpp` and `kernels/routing.cpp`."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from quire.ops.cpu import calls
from quire.ops.cpu.activation_bits import ActivationBits
from quire.ops.cpu.calls import ACTIVATIONS, DTYPES
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.launches import Launcher
from quire.ops.cpu.quantized_panels import Encoded, Panels, address
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.experts import GroupedExperts
from quire.ops.experts import ExpertCall, ExpertWeights, alike
from quire.ops.quantized import QuantizedWeight
from quire.ops.routing import SCORES, ExpertRouter


@dataclass(frozen=True)
class ExpertLinear:
    """One linear layer of all experts.

    Attributes:
        panels: [num_experts, bytes of a packed weight] uint8.
        form: `WeightForm` in `kernels/kernels.h`.
        table: as `Coded` has it.
        order: [num_experts, in] int64; None: the inputs are in order.
        codec: one of `CodecNumber` in `kernels/codecs.h`.
        has_byte_inputs: as `QuantizedWeight` has it.
    """

    panels: Tensor
    form: tuple[int, ...]
    table: Tensor | None
    order: Tensor | None
    codec: int
    has_byte_inputs: bool

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that differ between experts."""
        return [self.panels] if self.order is None else [self.panels, self.order]


@dataclass(frozen=True)
class ExpertPanels:
    """All experts of a layer; `size` is the intermediate one.

    Attributes:
        gate_up: gates and ups, or gates alone if there is `up`.
        gate_up_bias, down_bias: [num_experts, out] float32.
        dtype: of `x`; None: any float type.
    """

    gate_up: ExpertLinear
    up: ExpertLinear | None
    down: ExpertLinear
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    hidden_size: int
    size: int
    dtype: torch.dtype | None

    @property
    def layers(self) -> list[ExpertLinear]:
        """The layers that exist."""
        return [layer for layer in (self.gate_up, self.up, self.down) if layer is not None]

    @property
    def bytes_each(self) -> int:
        """Bytes of one expert's weights."""
        return sum(layer.panels[0].numel() for layer in self.layers)


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
        self._experts = launcher.bind_by_name(calls.EXPERTS)
        self._route = launcher.bind(calls.ROUTE)

    def route(self, x: Tensor, router: ExpertRouter) -> tuple[Tensor, Tensor]:
        routing, weight = router.routing, router.weight
        given = [tensor for tensor in (weight, router.bias, router.correction, router.shares) if tensor is not None]
        is_covered = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in given)
        if is_covered and x.dtype in DTYPES and x.stride(1) == 1:
            ids = self._empty(len(x), routing.top_k, dtype=torch.int64)
            weights = self._empty(len(x), routing.top_k, dtype=torch.float32)
            if not self._route(
                x.data_ptr(), weight.data_ptr(), address(router.bias), address(router.correction),
                address(router.shares), ids.data_ptr(), weights.data_ptr(), len(x), x.stride(0), weight.shape[1],
                len(weight), routing.top_k, SCORES.index(routing.score), routing.renormalize, routing.num_groups,
                routing.top_groups, routing.group_best, DTYPES[x.dtype], torch.get_num_threads(), routing.floor,
                routing.scale, routing.distance,
            ):  # fmt: skip
                return ids, weights
        return self._fallbacks.run(self._eager.route, x, router)

    def pack(self, experts: Iterable[ExpertWeights], num_experts: int) -> PackedExperts:
        packed: ExpertPanels | None = None
        rest = alike(experts)
        for index, expert in enumerate(rest):
            layers = self._encode(expert)
            if packed is None:
                if layers is None:
                    if isinstance(expert.down, QuantizedWeight):
                        self._fallbacks.say_of_quantized(expert.down)
                    return self._eager.pack_experts(chain([expert], rest), num_experts)
                packed = _empty_panels(expert, num_experts, layers)
                for layer in packed.layers:
                    is_dry = layer.panels.is_meta
                    self._bits.say(layer.codec, has_byte_inputs=layer.has_byte_inputs, is_dry=is_dry)
            assert layers is not None, "the kernels take all experts that are like the first one"
            for layer, encoded in zip(packed.layers, layers, strict=True):
                self._panels.pack(encoded.coded, encoded.form, layer.panels[index])
                if layer.order is not None and encoded.coded.order is not None:
                    layer.order[index] = encoded.coded.order
            for biases, bias in ((packed.gate_up_bias, expert.gate_up_bias), (packed.down_bias, expert.down_bias)):
                if biases is not None and bias is not None:
                    biases[index] = bias
        return packed or self._eager.pack_experts((), num_experts)

    def tensors(self, packed: PackedExperts, index: int) -> list[Tensor]:
        if isinstance(packed, GroupedExperts):
            return self._eager.expert_tensors(packed, index)
        biases = [bias for bias in (packed.gate_up_bias, packed.down_bias) if bias is not None]
        return [part[index] for part in [*chain.from_iterable(layer.tensors for layer in packed.layers), *biases]]

    def run(self, packed: PackedExperts, call: ExpertCall) -> Tensor:
        """Runs `Backend.experts`.

        Raises:
            ValueError: `x` has another dtype or shape than the experts take, or an id is invalid.
        """
        if isinstance(packed, GroupedExperts):
            return self._fallbacks.run(self._eager.experts, packed, call)
        gate_up, up, down = packed.gate_up, packed.up, packed.down
        x, ids, weights = call.x, call.ids.contiguous(), call.weights.contiguous()
        if x.dtype not in DTYPES or x.dtype != (packed.dtype or x.dtype) or x.shape[1] != packed.hidden_size:
            takes = packed.dtype or "floats"
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; these experts take {takes} [*, {packed.hidden_size}].")
        x = x if x.stride(1) == 1 else x.contiguous()
        out = self._empty(*x.shape, dtype=x.dtype)
        added = call.low_rank
        if added is not None and added.gate_up.a.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype}, the experts' adapters are {added.gate_up.a.dtype}.")
        other = gate_up if up is None else up  # a form that is not read, if there are no ups apart
        failed = self._experts(
            x=x.data_ptr(), out=out.data_ptr(), ids=ids.data_ptr(), weights=weights.data_ptr(),
            gate_up=gate_up.panels.data_ptr(), up=0 if up is None else up.panels.data_ptr(),
            down=down.panels.data_ptr(),
            gate_up_table=address(gate_up.table), up_table=address(other.table), down_table=address(down.table),
            gate_up_order=address(gate_up.order), up_order=address(other.order), down_order=address(down.order),
            gate_up_bias=address(packed.gate_up_bias), down_bias=address(packed.down_bias),
            gate_up_a=address(added and added.gate_up.a), gate_up_b=address(added and added.gate_up.b),
            down_a=address(added and added.down.a), down_b=address(added and added.down.b),
            adapters=address(added and added.adapters), ranks=address(added and added.gate_up.ranks),
            rank=0 if added is None else added.down.b.shape[1],
            rows=len(x), x_stride=x.stride(0), hidden=packed.hidden_size, size=packed.size,
            num_experts=len(down.panels), top_k=ids.shape[1], activation=ACTIVATIONS[call.activation],
            **calls.form_fields("gate_up_", gate_up.form), **calls.form_fields("up_", other.form),
            **calls.form_fields("down_", down.form),
            gate_up_x_bits=self._bits_of(x, gate_up), up_x_bits=self._bits_of(x, other),
            down_x_bits=self._bits_of(x, down), weighs_inputs=call.weighs_inputs, dtype=DTYPES[x.dtype],
            num_threads=torch.get_num_threads(),
        )  # fmt: skip
        if failed == 3:
            raise ValueError(f"ids of experts must be from 0 to {len(down.panels) - 1}, or -1.")
        if failed == 2:
            raise MemoryError(f"no memory for {ids.shape[1]} experts of {len(x)} tokens")
        if failed:  # a processor that cannot convert float16
            return self.run(packed, call._replace(x=x.float())).to(x.dtype)
        return out

    def _bits_of(self, x: Tensor, layer: ExpertLinear) -> int:
        return self._bits.of(x.dtype, layer.codec, has_byte_inputs=layer.has_byte_inputs)

    def _encode(self, expert: ExpertWeights) -> list[Encoded] | None:
        """Prepares its weights for the kernel, as in `ExpertPanels.layers`; None if the kernel does not take them."""
        of_inputs = [expert.gate_up] if expert.up is None else [expert.gate_up, expert.up]
        is_joined = expert.is_gated and expert.up is None
        found = [self._panels.encode(weight, is_gated=is_joined) for weight in of_inputs]
        found.append(self._panels.encode(expert.down, is_gated=False))
        layers = [each for each in found if each is not None]
        return layers if len(layers) == len(found) else None


def _empty_panels(expert: ExpertWeights, num_experts: int, layers: list[Encoded]) -> ExpertPanels:
    """Allocates memory for experts of this form."""

    def layer(encoded: Encoded) -> ExpertLinear:
        coded = encoded.coded
        return ExpertLinear(
            coded.codes.new_empty(num_experts, encoded.num_bytes, dtype=torch.uint8),
            encoded.form,
            coded.table,
            None if coded.order is None else coded.order.new_empty(num_experts, len(coded.order)),
            coded.codec,
            coded.has_byte_inputs,
        )

    def biases(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.new_empty(num_experts, len(bias), dtype=torch.float32)

    gate_up, *ups, down = map(layer, layers)
    plain = [weight.dtype for weight in (expert.gate_up, expert.up, expert.down) if isinstance(weight, Tensor)]
    hidden_size, size = expert.down.shape
    return ExpertPanels(
        gate_up, ups[0] if ups else None, down, biases(expert.gate_up_bias), biases(expert.down_bias), hidden_size,
        size, plain[0] if plain else None,
    )  # fmt: skip
