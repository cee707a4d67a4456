"""Finds what the tensors of an adapter mean for experts, where it has all of a layer's together."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.adapters import Adapters, AdapterWeight, ExpertNames
from quire.executor.weights.peft.config import PeftConfig
from quire.executor.weights.peft.tensors import ModuleTensors, plain_name

_PARTS = {
    "gate_up_proj": "gate_up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip


class _Stack(NamedTuple):
    """Weights of one kind of layer, of all experts: `a` [experts, rank, in] and `b` [experts, out, rank]."""

    part: str
    a: Tensor
    b: Tensor


class ExpertMatching:
    """Finds the mixtures of a rank that an adapter's modules belong to.

    An adapter has the fused parameters of a layer's experts as PEFT saves them (`target_parameters`: `lora_A`
    [experts * rank, in] and `lora_B` [out, rank * experts], the expert changing fastest), or stacks of one kind of
    layer, [experts, rank, in] and [experts, out, rank], where one that all experts share has a single member.
    """

    def __init__(self, place: Adapters, config: PeftConfig) -> None:
        self._config = config
        self._mixtures = {_key(plain_name(names.module)): names for names in reversed(place.experts)}

    def weights(self, tensors: ModuleTensors) -> dict[str, AdapterWeight]:
        """Returns the weights of a rank's experts, by the names of their layers; nothing if the module is no mixture.

        Raises:
            ModelLoadError: the tensors have other shapes.
        """
        module = tensors.module
        while module.endswith(".base_layer"):
            module = module.removesuffix(".base_layer")
        names = self._mixtures.get(_key(module))
        if names is not None:
            return dict(_divide(names, _of_parameter(tensors, names, self._config)))
        owner, _, part = module.rpartition(".")
        names = self._mixtures.get(_key(owner)) if part in _PARTS else None
        if names is not None:
            return dict(_divide(names, _of_stacks(tensors, names, _PARTS[part])))
        return {}


def _key(module: str) -> tuple[object, ...]:
    """Returns what the names of one mixture have in common: libraries give the block around `experts` other names."""
    parts = module.split(".")
    return (len(parts), *parts[:-2], "experts") if parts[-1] == "experts" else (len(parts), *parts)


def _of_parameter(tensors: ModuleTensors, names: ExpertNames, config: PeftConfig) -> _Stack:
    a, b = _both(tensors)
    num_experts, hidden, size = names.shape
    inputs_and_outputs = a.shape[1], b.shape[0]
    first = (hidden, 2 * size)
    forms = {first: "gate_up", (size, hidden): "down", first[::-1]: "gate_up", (hidden, size): "down"}
    if a.dim() != 2 or inputs_and_outputs not in forms or len(a) % num_experts or len(a) != b.shape[1]:
        raise ModelLoadError(
            f"{tensors.keys['a']} and {tensors.keys['b']} are {list(a.shape)} and {list(b.shape)}; the {num_experts} "
            f"experts map {hidden} inputs to {2 * size} gates and ups, and {size} inputs to {hidden} outputs."
        )
    part, rank = forms[inputs_and_outputs], len(a) // num_experts
    scale = config.scale(f"{tensors.full_name.replace('.base_layer', '')}.{part}_proj")
    stack_a, stack_b = a.view(num_experts, rank, -1), b.view(len(b), rank, num_experts).permute(2, 0, 1)
    if inputs_and_outputs in (first, (size, hidden)):
        return _Stack(part, stack_a, stack_b * scale)
    return _Stack(part, stack_b.mT * scale, stack_a.mT)  # of a weight that is stored [in, out]


def _of_stacks(tensors: ModuleTensors, names: ExpertNames, part: str) -> _Stack:
    a, b = _both(tensors)
    counts = {1, names.shape.num_experts}
    if a.dim() != 3 or b.dim() != 3 or len(a) not in counts or len(b) not in counts:
        raise ModelLoadError(
            f"{tensors.keys['a']} and {tensors.keys['b']} are {list(a.shape)} and {list(b.shape)}; [experts, rank, in] "
            f"and [experts, out, rank] are needed, with 1 or {names.shape.num_experts} experts."
        )
    return _Stack(part, a, b * tensors.scale)


def _both(tensors: ModuleTensors) -> tuple[Tensor, Tensor]:
    if others := sorted(tensors.by_kind.keys() - {"a", "b"}):
        raise ModelLoadError(f"{tensors.keys[others[0]]} is not served for experts; they take lora_A and lora_B.")
    if len(tensors.by_kind) != 2:
        [only] = tensors.keys.values()
        raise ModelLoadError(f"The adapter has {only}, and not the other of the two.")
    return tensors.by_kind["a"].float(), tensors.by_kind["b"].float()


def _divide(names: ExpertNames, stack: _Stack) -> Iterator[tuple[str, AdapterWeight]]:
    """Yields the weights of each of the rank's experts."""
    for index, own in zip(names.own, names.names, strict=True):
        a, b = (each[index if len(each) > 1 else 0] for each in (stack.a, stack.b))
        *first, down = own
        if stack.part == "down":
            yield down, AdapterWeight(a, b)
        elif stack.part == "gate_up" and len(first) == 2:
            halves = (b[::2], b[1::2]) if names.is_interleaved else b.tensor_split(2)
            yield from ((name, AdapterWeight(a, half)) for name, half in zip(first, halves, strict=True))
        else:
            yield first[0 if stack.part == "gate" else -1], AdapterWeight(a, b)
