"""A kernel's function and its parameters."""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


class KernelFunction:
    """A function that Triton compiles.

    Attributes:
        name: the function's.
        module: name of the module that defines it.
        parameters: names of the parameters, in order.
        constants: those of the parameters that are `tl.constexpr`, and their defaults, `inspect.Parameter.empty` if
            there is none.
        arguments: the other parameters: pointers, and scalars, which are never specialized.
        annotated: Triton's types of scalars that the function declares.
        function: for the compiler, or the interpreter under `TRITON_INTERPRET=1`.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        parameters = inspect.signature(function).parameters
        self.name = function.__name__
        self.module = function.__module__
        self.parameters = tuple(parameters)
        self.constants: dict[str, Any] = {
            name: each.default for name, each in parameters.items() if each.annotation is tl.constexpr
        }
        self.arguments = tuple(name for name in parameters if name not in self.constants)
        self.annotated = {
            name: parameters[name].annotation.name.replace("int", "i")
            for name in self.arguments
            if isinstance(parameters[name].annotation, tl.dtype)
        }
        scalars = [name for name in self.arguments if not is_pointer(name)]
        self.function = triton.jit(do_not_specialize=scalars)(function)


def is_pointer(parameter: str) -> bool:
    """Returns True for the name of a kernel's parameter that is a pointer."""
    return parameter.endswith("_ptr")
