"""Records the calls that a class's code makes on tensors, as a `Program` for any number of tokens.

The code runs twice, with different numbers of tokens, under a mode that sees each torch function. Our layers are one
call each. An integer that differs between the runs depends on the number of tokens. Code whose calls depend on the
values in a tensor has no program.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quire.executor.models.transformers.programs.program import Call, Meta, Program, Ref, Size

_READS = frozenset(
    {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero", "unique", "masked_select"}
    | {"__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"}
)
"""Functions whose results, or their shapes, the code may branch on."""


class Untraceable(Exception):
    """The code has no program, for the stated reason."""


class _Tracer(TorchFunctionMode):
    """Records the calls of one run. Tensors that it does not know are constants."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.tensors: list[Tensor] = []  # by value; all stay referenced, so that no address is reused
        self._values: dict[int, int] = {}
        self._constant_memory: set[int] = {_storage(each) for each in inputs}
        for tensor in inputs:
            self._add(tensor)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        before = tuple(self._encoded(each) for each in (args, kwargs))
        result = func(*args, **kwargs)
        if name in _READS or kwargs.get("out") is not None:
            if any(True for _ in self._known((args, kwargs))):
                raise Untraceable(f"it uses the numbers of a tensor by {name}")
        elif name == "__setitem__" or (_is_in_place(name) and result is args[0]):
            self._change(func, args, before)
        else:
            self.note(func, args, before, result)
        return result

    def note(self, function: Callable[..., Any], args: Any, encoded: tuple[Any, Any], result: Any) -> None:
        """Records a call that changes no tensor. A call that returns its input is not recorded."""
        made = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple | list) else []
        tensors = [each for each in made if isinstance(each, Tensor)]
        if not tensors:
            return
        if isinstance(result, Tensor):
            same = next((each for each in self._known(args) if _is_same(each, result)), None)
            if same is not None:
                self.tensors.append(result)  # both addresses have the same value
                self._values[id(result)] = self._values[id(same)]
                return
        outs = tuple(self._add(each) if isinstance(each, Tensor) else None for each in made)
        self.calls.append(Call(function, encoded[0], encoded[1], outs, is_single=isinstance(result, Tensor)))

    def run_part(self, part: Callable[..., Any], forward: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Calls `forward(*args)`, and records it as one call of `part`."""
        encoded = self._encoded(args)
        with torch._C.DisableTorchFunction():
            result = forward(*args)
            self.note(part, args, (encoded, {}), result)
        return result

    def value_of(self, tensor: Tensor) -> int:
        """Returns a tensor's value. Raises Untraceable for an unknown tensor."""
        if id(tensor) not in self._values:
            raise Untraceable("its output is made of nothing that it was given")
        return self._values[id(tensor)]

    def _add(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        self._values[id(tensor)] = index = len(self.tensors) - 1
        return index

    def _known(self, args: Any) -> Iterator[Tensor]:
        for each in _leaves(args):
            if isinstance(each, Tensor) and id(each) in self._values:
                yield each

    def _encoded(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            index = self._values.get(id(value))
            if index is None:
                self._constant_memory.add(_storage(value))
            return value if index is None else Ref(index)
        if isinstance(value, dict):
            return {name: self._encoded(each) for name, each in value.items()}
        if isinstance(value, slice):
            return slice(*(self._encoded(each) for each in (value.start, value.stop, value.step)))
        if isinstance(value, tuple | list):
            parts = [self._encoded(each) for each in value]
            return parts if isinstance(value, list) else tuple(parts)
        return value

    def _change(self, func: Any, args: tuple, encoded: tuple[Any, Any]) -> None:
        """Records a call that writes into its first argument. That and all views of its memory become new values."""
        target = args[0]
        memory = _storage(target)
        if id(target) not in self._values or memory in self._constant_memory:
            raise Untraceable("it writes into a tensor that it keeps, or was given")
        sharing = {id(each): each for each in self.tensors if _storage(each) == memory and each is not target}
        views = tuple(Ref(self._values[each]) for each in sharing)
        outs = tuple(self._add(each) for each in (target, *sharing.values()))
        self.calls.append(Call(_Writing(func, len(views)), views + encoded[0], encoded[1], outs, is_single=False))


@dataclass(frozen=True)
class _Writing:
    """A function that writes into its first argument: `(*views of it, argument, ...) → (argument, *views)`."""

    function: Callable[..., Any]
    num_views: int

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        views, (target, *others) = args[: self.num_views], args[self.num_views :]
        self.function(target, *others, **kwargs)
        return (target, *views)


RunPart = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, ...]], Any]
"""Maps (part, forward, arguments) to `forward(*arguments)`, as one call of `part` in a program."""

Run = Callable[[int], tuple[Sequence[Tensor], Callable[[RunPart], Tensor]]]
"""Maps a number of tokens to the inputs, and to the code that computes an output from them."""


def trace(run: Run, num_tokens: tuple[int, int], parts: Sequence[nn.Module]) -> Program:
    """Builds the program of `run` from runs with these two numbers of tokens.

    Args:
        parts: modules that are one call each; only their tensors count as arguments.

    Raises:
        Untraceable: the code has none.
    """
    first, second = (_trace_once(run, count, parts) for count in num_tokens)
    return _unified(first, second, num_tokens)


def _trace_once(run: Run, num_tokens: int, parts: Sequence[nn.Module]) -> Program:
    inputs, code = run(num_tokens)
    tracer = _Tracer(inputs)
    with _noting(tracer, parts), tracer:
        output = code(tracer.run_part)
    metas = {index: Meta(tuple(each.shape), each.dtype, _storage(each)) for index, each in enumerate(tracer.tensors)}
    program = Program(tracer.calls, tuple(range(len(inputs))), tracer.value_of(output), metas)
    program.drop_unused()
    return program


@contextlib.contextmanager
def _noting(tracer: _Tracer, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Records each of `parts` as one call, while the context lasts."""

    def noted(part: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return tracer.run_part(part, forward, tuple(_tensors((*args, *kwargs.values()))))

        return call

    for part in parts:
        vars(part)["forward"] = noted(part, part.forward)
    try:
        yield
    finally:
        for part in parts:
            del vars(part)["forward"]


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    return (each for each in values if isinstance(each, Tensor))


def _unified(a: Program, b: Program, num_tokens: tuple[int, int]) -> Program:
    """Returns program `a`, with Sizes for the integers that differ in `b`."""
    if len(a.calls) != len(b.calls):
        raise Untraceable("what it calls depends on the number of tokens")
    to_b = dict(zip(a.inputs, b.inputs, strict=True))
    unify = _Unifier(num_tokens, to_b)
    for x, y in zip(a.calls, b.calls, strict=True):
        if x.function != y.function or len(x.outs) != len(y.outs):
            raise Untraceable("what it calls depends on the number of tokens")
        x.args, x.kwargs = unify.value(x.args, y.args), unify.value(x.kwargs, y.kwargs)
        to_b.update((own, other) for own, other in zip(x.outs, y.outs, strict=True) if own is not None)  # type: ignore[misc]
    if to_b.get(a.output) != b.output:
        raise Untraceable("its output depends on the number of tokens")
    for index in to_b:
        a.metas[index] = _with_axis(a.metas[index], b.metas[to_b[index]], num_tokens)
    a.metas = {index: a.metas[index] for index in to_b}
    return a


class _Unifier:
    """Replaces integers that differ between two runs by Sizes."""

    def __init__(self, num_tokens: tuple[int, int], to_b: dict[int, int]) -> None:
        self._counts = num_tokens
        self._to_b = to_b

    def value(self, x: Any, y: Any) -> Any:
        """Returns the value if it is the same in both runs, or a Size. Raises Untraceable for any other difference."""
        if type(x) is not type(y):
            raise Untraceable("what it passes depends on the number of tokens")
        if isinstance(x, Ref):
            if self._to_b.get(x.index) != y.index:
                raise Untraceable("what it passes depends on the number of tokens")
            return x
        if isinstance(x, Tensor):
            if x is not y and not (x.shape == y.shape and x.dtype == y.dtype and bool((x == y).all())):
                raise Untraceable("it makes tensors that its trace does not see")
            return x
        if isinstance(x, dict):
            return {name: self.value(each, y.get(name)) for name, each in x.items()}
        if isinstance(x, slice):
            return slice(*(self.value(getattr(x, each), getattr(y, each)) for each in ("start", "stop", "step")))
        if isinstance(x, tuple | list):
            if len(x) != len(y):
                raise Untraceable("what it passes depends on the number of tokens")
            return type(x)(self.value(*pair) for pair in zip(x, y, strict=True))
        if isinstance(x, int) and not isinstance(x, bool) and x != y:
            low, high = self._counts
            factor, rest = divmod(y - x, high - low)
            if rest:
                raise Untraceable("a size is no multiple of the number of tokens")
            return Size(factor, x - factor * low)
        if isinstance(x, float | bool | str | torch.dtype | torch.device) and x != y:
            raise Untraceable("what it passes depends on the number of tokens")
        return x


def _with_axis(x: Meta, y: Meta, num_tokens: tuple[int, int]) -> Meta:
    if len(x.shape) != len(y.shape):
        return x._replace(is_tangled=True)
    axes = [axis for axis, sizes in enumerate(zip(x.shape, y.shape, strict=True)) if len(set(sizes)) > 1]
    if not axes:
        return x
    is_plain = len(axes) == 1 and (x.shape[axes[0]], y.shape[axes[0]]) == num_tokens
    return x._replace(axis=axes[0]) if is_plain else x._replace(is_tangled=True)


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


def _is_same(x: Tensor, result: Tensor) -> bool:
    """Returns True if two tensors have the same elements in the same memory."""
    if result is x:
        return True
    with torch._C.DisableTorchFunction():
        is_alike = x.shape == result.shape and x.stride() == result.stride() and x.dtype == result.dtype
        return is_alike and x.numel() > 0 and x.data_ptr() == result.data_ptr()


def _is_in_place(name: str) -> bool:
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__index__", "__invert__", "__int__")
    return name.endswith("_") and not name.endswith("__")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
