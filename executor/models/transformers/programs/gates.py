"""Fuses gates in a program: a product with an activated gate becomes one operation of ours."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.executor.models.transformers import layer_modules
from quire.executor.models.transformers.programs.operations import ActivateAndMultiply, MultiplyGate
from quire.executor.models.transformers.programs.program import Call, Program, Ref
from quire.ops.activations import PlainActivation
from quire.ops.backend import Backend
from quire.ops.recurrent import GateActivation

MULTIPLY = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_PARTS = (torch.chunk, Tensor.chunk, torch.split, Tensor.split)
_CASTS = (Tensor.to, Tensor.float, Tensor.type_as)
_GATES: dict[Callable[..., Any], GateActivation] = {
    **dict.fromkeys((torch.sigmoid, F.sigmoid, Tensor.sigmoid), "sigmoid"),
    F.softplus: "softplus",
}
_ACTIVATIONS: dict[Callable[..., Any], PlainActivation] = {F.silu: "silu", F.relu: "relu", F.gelu: "gelu"}


def activation_of(call: Call) -> PlainActivation | None:
    """Returns the elementwise function of a call, if it is one of ours."""
    if isinstance(call.function, layer_modules.Activation):
        return call.function.activation
    if call.function is F.gelu:
        approximate = call.kwargs.get("approximate", "none")
        return "gelu_tanh" if approximate == "tanh" else "gelu"
    return _ACTIVATIONS.get(call.function)


def fuse_gates(program: Program, ops: Backend) -> None:
    """Replaces the products that operations of ours compute."""
    made = program.producers()
    for place, call in enumerate(program.calls):
        if call.function not in MULTIPLY or call.kwargs or not all(isinstance(each, Ref) for each in call.args):
            continue
        for x, factor in (call.args, call.args[::-1]):
            whole, gate = _halved(program, made, x, factor), _gate(program, made, x, factor)
            if whole is not None:
                operation = ActivateAndMultiply(ops, whole[1])
                program.calls[place] = Call(operation, (whole[0],), {}, call.outs)
                break
            if gate is not None:
                program.calls[place] = Call(MultiplyGate(ops, gate[1]), (x, gate[0]), {}, call.outs)
                break


def _halved(program: Program, made: Mapping[int, Call], x: Ref, factor: Ref) -> tuple[Ref, PlainActivation] | None:
    """Finds the value whose first half becomes `factor` by an activation, and whose second half is `x`."""
    activated = made.get(factor.index)
    activation = None if activated is None else activation_of(activated)
    if activated is None or activation is None or not activated.args:
        return None
    gate, up = _half(program, made, activated.args[0]), _half(program, made, x)
    return (gate[0], activation) if gate and up and gate == (up[0], 0) and up[1] == 1 else None


def _half(program: Program, made: Mapping[int, Call], x: Any) -> tuple[Ref, int] | None:
    """Returns the value that `x` is a half of, in the last dimension, and which half it is."""
    call = made.get(x.index) if program.is_hidden(x) else None
    if call is None or not call.args or not program.is_hidden(call.args[0]):
        return None
    whole, size = call.args[0], program.metas[x.index].shape[-1]
    if program.metas[whole.index].shape != (*program.metas[x.index].shape[:-1], 2 * size):
        return None
    if call.function is Tensor.narrow and call.args[2] in (0, size):
        return whole, call.args[2] // size
    return (whole, call.outs.index(x.index)) if call.function in _PARTS else None


def _gate(program: Program, made: Mapping[int, Call], x: Ref, factor: Ref) -> tuple[Ref, GateActivation] | None:
    """Finds the gate that becomes `factor`: one value for each element of `x`, or for each of several equal parts."""
    source, activation = factor, None
    while (call := made.get(source.index)) is not None and call.args and isinstance(call.args[0], Ref):
        is_spread = call.function is Tensor.unsqueeze and call.args[1:] == (-1,)
        if call.function in _GATES and activation is None and len(call.args) == 1 and not call.kwargs:
            activation = _GATES[call.function]
        elif call.function not in _CASTS and not (is_spread and activation is None):
            break
        source = call.args[0]
    if activation is None or not program.is_hidden(source):
        return None
    whole, own, spread = (program.metas[each.index] for each in (x, source, factor))
    lead = own.shape[:-1]
    is_each = spread.shape == whole.shape == own.shape
    is_shared = spread.shape == (*whole.shape[:-1], 1) and spread.shape in (own.shape, (*own.shape, 1))
    is_fit = is_each or (is_shared and whole.shape[: len(lead)] == lead)
    return (source, activation) if is_fit and whole.dtype == own.dtype == spread.dtype else None
