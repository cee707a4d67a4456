"""Replaces torch's operations in a program by those of our backend, where they compute the same."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.executor.models.transformers import layer_modules
from quire.executor.models.transformers.programs.gates import MULTIPLY, activation_of, fuse_gates
from quire.executor.models.transformers.programs.operations import (
    Activate,
    ActivateAndMultiply,
    Add,
    AddNorm,
    LayerNorm,
    MultiplyGate,
    Scale,
    TakeRows,
)
from quire.executor.models.transformers.programs.program import Call, InStep, Program, Ref
from quire.ops.backend import Backend

_ADD = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_DIVIDE = (torch.div, Tensor.div, Tensor.__truediv__)
_TANH = (torch.tanh, Tensor.tanh)


def merge_projections(program: Program) -> None:
    """Merges the calls of fused layers with one input into one call; their outputs become views of its result."""
    merged: dict[tuple[int, int], int] = {}
    calls: list[Call] = []
    for call in program.calls:
        part = call.function
        if not isinstance(part, layer_modules.FusedPart):
            calls.append(call)
            continue
        (x,), (out,) = call.args, call.outs
        key = (id(part.fused), x.index)
        if key not in merged:
            assert out is not None
            meta = program.metas[out]
            merged[key] = program.add_value(meta._replace(shape=(*meta.shape[:-1], sum(part.fused.sizes))))
            calls.append(Call(layer_modules.FusedWhole(part.fused), (x,), {}, (merged[key],)))
        start = sum(part.fused.sizes[: part.index])
        calls.append(Call(Tensor.narrow, (Ref(merged[key]), -1, start, part.fused.sizes[part.index]), {}, (out,)))
    program.calls = calls


def weigh_norms(program: Program, ops: Backend, device: torch.device) -> None:
    """Replaces norms without a weight by ours, with a weight of ones."""
    for call in program.calls:
        norm = call.function
        if isinstance(norm, layer_modules.PlainNorm):
            x, out = (program.metas[index] for index in (*call.reads(), *call.outs) if index is not None)
            if x.dtype == out.dtype:
                call.function = layer_modules.RMSNorm(
                    ops, torch.ones(x.shape[-1], dtype=x.dtype, device=device), norm.eps
                )


class Rewriter:
    """Rewrites the elementwise calls of one program."""

    def __init__(self, program: Program, ops: Backend) -> None:
        self._program = program
        self._ops = ops
        self._metas = program.metas

    def run(self) -> None:
        """Rewrites all calls that match."""
        fuse_gates(self._program, self._ops)  # first, because other rewrites may write into a gate that is read later
        for place, call in enumerate(self._program.calls):
            rewritten = self._layer_norm(call) or self._rows(call) or self._elementwise(place, call)
            if rewritten is not None:
                self._program.calls[place] = rewritten
        self._fuse_norms()
        self._fuse_softcaps()
        self._program.drop_unused()

    # -------------------------------------------------------------------------------------------------- one call

    def _layer_norm(self, call: Call) -> Call | None:
        if call.function is not F.layer_norm:
            return None
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        given = dict(zip(names, call.args, strict=False)) | call.kwargs
        x, weight, bias = given["input"], given.get("weight"), given.get("bias")
        is_plain = self._program.is_hidden(x) and len(given["normalized_shape"]) == 1
        if (
            not is_plain
            or any(isinstance(each, Ref) for each in (weight, bias))
            or (weight is None and bias is not None)
        ):
            return None
        return Call(LayerNorm(self._ops, weight, bias, given.get("eps", 1e-5)), (x,), {}, call.outs)

    def _rows(self, call: Call) -> Call | None:
        """Matches an embedding that was not replaced: of positions, perhaps with an offset."""
        if (
            call.function is not F.embedding
            or not isinstance(call.args[0], Ref)
            or not isinstance(call.args[1], Tensor)
        ):
            return None
        meta = self._metas[call.args[0].index]
        if len(meta.shape) != 2 or meta.shape[0] != 1 or meta.axis != 1 or meta.dtype != torch.int64:
            return None
        index, rows = call.args[:2]
        counted = self._program.producers().get(index.index)
        if counted is not None and counted.function in _ADD and not counted.kwargs:
            first, offset = counted.args
            if isinstance(first, Ref) and type(offset) is int and offset > 0:
                index, rows = first, rows[offset:]
        return Call(TakeRows(self._ops, rows), (index,), {}, call.outs)

    def _elementwise(self, place: int, call: Call) -> Call | None:
        if call.function in _ADD and len(call.args) == 2 and not call.kwargs:
            return self._add(place, call)
        activation = activation_of(call)
        if activation is not None:
            return self._into(place, call, call.args[0], Activate(self._ops, activation))
        factor = self._factor(call)
        if factor is not None:
            x, number = factor
            return self._into(place, call, x, Scale(self._ops, number))
        if call.function in MULTIPLY and not call.kwargs and self._program.are_alike(*call.args):
            return Call(MultiplyGate(self._ops, "identity"), call.args, {}, call.outs)
        return None

    def _add(self, place: int, call: Call) -> Call | None:
        x, y = call.args
        if x == y or not self._program.are_alike(x, y):
            return None
        for residual, other in ((x, y), (y, x)):
            if self._may_write(place, residual):
                return Call(Add(self._ops), (other, residual), {}, call.outs)
        return None

    def _into(self, place: int, call: Call, x: Any, operation: Callable[..., Any]) -> Call | None:
        is_fit = self._program.is_hidden(x) and self._may_write(place, x)
        return Call(operation, (x,), {}, call.outs) if is_fit else None

    def _factor(self, call: Call) -> tuple[Any, float] | None:
        """Returns `x` and the scalar, if the call multiplies them."""
        if call.kwargs or len(call.args) != 2:
            return None
        x, y = call.args
        if call.function in MULTIPLY and not isinstance(x, Ref):
            x, y = y, x
        number = y.item() if isinstance(y, Tensor) and y.dim() == 0 else y
        if not isinstance(x, Ref) or not isinstance(number, int | float) or isinstance(number, bool):
            return None
        if call.function in MULTIPLY:
            return x, float(number)
        return (x, 1 / number) if call.function in _DIVIDE and number else None

    # ----------------------------------------------------------------------------------------------- several calls

    def _fuse_norms(self) -> None:
        """Fuses a sum and its norm into one operation."""
        calls = self._program.calls
        for place, call in enumerate(calls):
            if not isinstance(call.function, Add):
                continue
            total = call.outs[0]
            for later in range(place + 1, len(calls)):
                norm = calls[later].function
                if isinstance(norm, layer_modules.RMSNorm) and calls[later].args == (Ref(total),):  # type: ignore[arg-type]
                    fused = AddNorm(self._ops, norm.weight, norm.eps)
                    outs = (calls[later].outs[0], total)
                    calls[place] = Call(fused, call.args, {}, outs, is_single=False)
                    del calls[later]
                    break

    def _fuse_softcaps(self) -> None:
        """Fuses `cap * tanh(factor * x)` into one operation, if the values between are not used."""
        made = self._program.producers()
        reads = Counter(index for call in self._program.calls for index in call.reads())
        for place, call in enumerate(self._program.calls):
            factor = self._factor(call)
            tanh = made.get(factor[0].index) if factor is not None else None
            if factor is None or tanh is None or tanh.function not in _TANH or reads[factor[0].index] > 1:
                continue
            scale = made.get(tanh.args[0].index)
            if scale is not None and isinstance(scale.function, Scale) and reads[tanh.args[0].index] == 1:
                cap = factor[1]
                capped = Scale(self._ops, scale.function.factor * cap, cap)
                self._program.calls[place] = Call(capped, scale.args, {}, call.outs)

    # ------------------------------------------------------------------------------------------------------ facts

    def _may_write(self, place: int, x: Ref) -> bool:
        """Returns True if `x` and its memory are not read after call `place`, and a call of this step allocated the
        memory.
        """
        memory = self._metas[x.index].storage
        sharing = {index for index, meta in self._metas.items() if meta.storage == memory}
        calls = self._program.calls
        if any(sharing.intersection(call.reads()) for call in calls[place + 1 :]) or self._program.output in sharing:
            return False
        first = next((call for call in calls if sharing.intersection(call.outs)), None)
        return first is not None and not sharing.intersection(self._program.inputs) and _owns(first)


def _owns(call: Call) -> bool:
    """Returns True if a call's results are in new memory."""
    own = (
        layer_modules.LayerModule,
        InStep,
        Add,
        AddNorm,
        LayerNorm,
        TakeRows,
        Scale,
        MultiplyGate,
        ActivateAndMultiply,
        Activate,
    )
    return isinstance(call.function, own)
