"""The text that a compiled kernel depends on: its function, those that it calls, and the values that they read."""

import builtins
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import triton.language as tl


def source_of(kernel: Any) -> str:
    """The source of a `triton.jit` function, with that of its helpers and the values of the globals that they name."""
    texts: dict[str, str] = {}
    _collect(kernel, texts)
    return "\n".join(f"# {name}\n{texts[name]}" for name in sorted(texts))


def _collect(value: Any, texts: dict[str, str]) -> None:
    function = plain_function(value)
    name = f"{function.__module__}.{function.__qualname__}"
    if name in texts:
        return
    texts[name] = inspect.getsource(function)
    for label, used in _used(function):
        if _is_compiled(used):
            _collect(used, texts)
        elif isinstance(used, tl.constexpr):
            texts[f"{name}: {label}"] = repr(used.value)
        elif not isinstance(used, ModuleType) and not callable(used):
            texts[f"{name}: {label}"] = repr(used)


def _used(function: Callable[..., None]) -> Iterator[tuple[str, Any]]:
    """Globals and enclosing variables that a function names, and attributes of modules of this project among them."""
    assert isinstance(function, FunctionType)
    closure = inspect.getclosurevars(function)
    names = set(_names(function.__code__))
    for name, used in sorted({**closure.globals, **closure.nonlocals}.items()):
        if isinstance(used, ModuleType) and not used.__name__.startswith("triton"):
            yield from ((f"{name}.{each}", vars(used)[each]) for each in sorted(names & set(vars(used))))
        elif not hasattr(builtins, name):
            yield name, used


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_compiled(value: Any) -> bool:
    """Returns True for a `triton.jit` function that is not Triton's own."""
    return not isinstance(value, type) and hasattr(value, "fn") and not value.fn.__module__.startswith("triton")


def plain_function(value: Any) -> Callable[..., None]:
    """The Python function of a `triton.jit` function, which may be the interpreter's."""
    return value.fn
