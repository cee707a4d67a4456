"""A forward pass as a list of calls: the tensor operations of a class's code, without the code.

`tracing.py` records a class's calls; `rewriting.py` and `heads.py` replace them by operations of our backend. A program
runs for any number of tokens: sizes that depend on it are `Size`s.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.executor.layers.step_context import StepContext
from quire.ops.backend import Backend


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of a program."""

    index: int


@dataclass(frozen=True, slots=True)
class Size:
    """A size `factor * num_tokens + offset`."""

    factor: int
    offset: int


class Meta(NamedTuple):
    """The properties of a value; shape and memory are those of the trace.

    Attributes:
        storage: values with the same number shared memory.
        axis: the dimension that counts tokens, if one does.
        is_tangled: the shape depends on the number of tokens in another way.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    axis: int | None = None
    is_tangled: bool = False


class InStep:
    """An operation that reads the step: `function(step, *args)`."""


class AttendingStep(InStep):
    """Attention, the only operation that mixes tokens.

    `function(step, *args, is_last=True)` returns only the tokens that `step.wanted` names.
    """


@dataclass
class Call:
    """A call `function(*args, **kwargs)`. The arguments may contain Refs and Sizes, also in nested tuples.

    Attributes:
        outs: the resulting values, in order; None for results that are no tensors.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: tuple[int | None, ...] = ()
    is_single: bool = True

    def reads(self) -> Iterator[int]:
        """Yields the values among its arguments."""
        return refs_in((self.args, tuple(self.kwargs.values())))


def refs_in(value: Any) -> Iterator[int]:
    """Yields the indices of the values in nested arguments."""
    if type(value) is Ref:
        yield value.index
    elif isinstance(value, slice):
        yield from refs_in((value.start, value.stop, value.step))
    elif isinstance(value, dict):
        yield from refs_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from refs_in(each)


def resolved(value: Any, values: Sequence[Any], num_tokens: int) -> Any:
    """Replaces Refs by tensors and Sizes by integers in nested arguments."""
    kind = type(value)
    if kind is Ref:
        return values[value.index]
    if kind is Size:
        return value.factor * num_tokens + value.offset
    if kind is tuple or kind is list:
        return kind(resolved(each, values, num_tokens) for each in value)
    if kind is dict:
        return {name: resolved(each, values, num_tokens) for name, each in value.items()}
    if kind is slice:
        return slice(*(resolved(each, values, num_tokens) for each in (value.start, value.stop, value.step)))
    return value


@dataclass
class Program:
    """Calls in order.

    Attributes:
        inputs: the input values.
        output: the returned value.
        metas: the properties of all values, by index.
    """

    calls: list[Call]
    inputs: tuple[int, ...]
    output: int
    metas: dict[int, Meta]

    def add_value(self, meta: Meta) -> int:
        """Adds a value and returns its index."""
        index = max(self.metas, default=0) + 1
        self.metas[index] = meta
        return index

    def producers(self) -> dict[int, Call]:
        """Maps each value to the call that computes it."""
        return {out: call for call in self.calls for out in call.outs if out is not None}

    def is_hidden(self, x: Any) -> bool:
        """Returns True if `x` is a floating-point value [1, num_tokens, size] or [num_tokens, size]."""
        if not isinstance(x, Ref):
            return False
        meta = self.metas[x.index]
        is_rows = (len(meta.shape) == 3 and meta.shape[0] == 1 and meta.axis == 1) or (
            len(meta.shape) == 2 and meta.axis == 0
        )
        return is_rows and meta.dtype.is_floating_point

    def are_alike(self, x: Any, y: Any) -> bool:
        """Returns True if both are such values, of one size and dtype."""
        if not self.is_hidden(x) or not self.is_hidden(y):
            return False
        a, b = self.metas[x.index], self.metas[y.index]
        return a.shape == b.shape and a.dtype == b.dtype

    def drop_unused(self) -> None:
        """Drops calls whose values are not used; attention stays."""
        needed, kept = {self.output}, []
        for call in reversed(self.calls):
            if isinstance(call.function, AttendingStep) or needed.intersection(call.outs):
                kept.append(call)
                needed.update(call.reads())
        self.calls = kept[::-1]

    def slice_to(self, targets: Sequence[int], stops: Callable[[Call], bool]) -> tuple[list[Call], set[int]]:
        """Returns the calls that compute `targets`, in order, and the values at which they start.

        Those values are inputs, and results of calls for which `stops` is True.
        """
        needed, calls, frontier = set(targets), [], set()
        for call in reversed(self.calls):
            made = needed.intersection(call.outs)
            if made and stops(call):
                frontier |= made
            elif made:
                calls.append(call)
                needed.update(call.reads())
        return calls[::-1], frontier | needed.intersection(self.inputs)


class Runner:
    """Runs a program, and frees each value after its last use.

    Attributes:
        selects: whether the last attention can be computed for the wanted tokens alone, and all that follows it.
        functions: what it calls, in order.
    """

    def __init__(self, program: Program, ops: Backend) -> None:
        self._ops = ops
        self._inputs = program.inputs
        self._output = program.output
        self._size = max([program.output, *program.metas, *program.inputs]) + 1
        last_use = {index: number for number, call in enumerate(program.calls) for index in call.reads()}
        released: list[list[int]] = [[] for _ in program.calls]
        for number, call in enumerate(program.calls):
            for out in call.outs:
                if out is not None and out != program.output:
                    released[last_use.get(out, number)].append(out)
        self._calls = [
            (call, _is_flat(call), isinstance(call.function, InStep), tuple(indices))
            for call, indices in zip(program.calls, released, strict=True)
        ]
        attending = [n for n, call in enumerate(program.calls) if isinstance(call.function, AttendingStep)]
        self._last = attending[-1] if attending else None
        self._carried = _carried(program, self._last) if self._last is not None else None
        self.selects = self._carried is not None
        self.functions = [call.function for call in program.calls]

    def run(self, inputs: Sequence[Tensor], num_tokens: int, step: StepContext | None = None) -> Tensor:
        """Returns the program's output; if `selects`, only for the tokens that `step.wanted` names."""
        values: list[Any] = [None] * self._size
        for index, tensor in zip(self._inputs, inputs, strict=True):
            values[index] = tensor
        for number, (call, is_flat, in_step, released) in enumerate(self._calls):
            args: Any = (
                [values[each.index] if type(each) is Ref else each for each in call.args]
                if is_flat
                else resolved(call.args, values, num_tokens)
            )
            if in_step:
                if number == self._last and self.selects and step is not None and step.wanted is not None:
                    out = call.function(step, *args, is_last=True)
                    num_tokens = self._select(values, step)
                else:
                    out = call.function(step, *args)
            elif call.kwargs:
                out = call.function(*args, **resolved(call.kwargs, values, num_tokens))
            else:
                out = call.function(*args)
            if call.is_single:
                values[call.outs[0]] = out  # type: ignore[index]
            else:
                for index_or_none, each in zip(call.outs, out, strict=True):
                    if index_or_none is not None:
                        values[index_or_none] = each
            del args, out
            for index in released:
                values[index] = None
        return values[self._output]

    def foreign(self) -> set[str]:
        """The names of torch's functions that it calls."""
        own = [type(function).__module__.startswith("quire.") for function in self.functions]
        return {function.__name__ for function, is_own in zip(self.functions, own, strict=True) if not is_own}

    def _select(self, values: list[Any], step: StepContext | None) -> int:
        """Keeps the wanted tokens of all values that are still needed; returns their number."""
        assert step is not None
        assert step.wanted is not None
        assert self._carried is not None
        tokens = step.wanted.tokens
        for index, axis in self._carried:
            x = values[index]
            if axis == 1 and x.dim() == 3 and len(x) == 1:
                values[index] = self._ops.take_rows(x[0], tokens).unsqueeze(0)
            else:
                values[index] = x.index_select(axis, tokens)
        return len(tokens)


def _is_flat(call: Call) -> bool:
    """Returns True if all of a call's arguments are values and constants, without nesting."""
    return not call.kwargs and not any(isinstance(each, list | dict | slice | tuple | Size) for each in call.args)


def _carried(program: Program, last: int) -> list[tuple[int, int]] | None:
    """Returns the values from before call `last` that are read after it, with their axes of tokens; None: one has no
    axis.
    """
    before = {out for call in program.calls[:last] for out in call.outs} | set(program.inputs)
    after = {index for call in program.calls[last + 1 :] for index in call.reads()} | {program.output}
    metas = {index: program.metas[index] for index in before & after if index is not None}
    if any(meta.is_tangled for meta in metas.values()):
        return None
    return [(index, meta.axis) for index, meta in sorted(metas.items()) if meta.axis is not None]
