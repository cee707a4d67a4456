"""Kernels, and their launches.

A kernel's pointers end in `_ptr`. Integers and floats are never specialized: a value that is 1, or divisible by 16,
compiles no new variant while requests wait. So a kernel states divisibility itself, with `size // 8 * 8`: the compiler
ignores `tl.multiple_of` of an argument. Constants are annotated `tl.constexpr`, and come from a closed set of values.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


class Kernel:
    """A Triton kernel: `kernel(grid, *arguments, num_warps=..., num_stages=..., **constants)` launches it.

    Attributes:
        name: the function's.
        module: name of the module that defines it.
        parameters: names of the parameters, constants included, in order.
        function: for the compiler, or the interpreter under `TRITON_INTERPRET=1`.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        parameters = inspect.signature(function).parameters.values()
        scalars = [
            each.name for each in parameters if each.annotation is not tl.constexpr and not is_pointer(each.name)
        ]
        self.parameters = tuple(each.name for each in parameters)
        self.module = function.__module__
        self.name = function.__name__
        self.function = triton.jit(do_not_specialize=scalars)(function)

    def __call__(
        self, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
    ) -> None:
        self.function[grid](*arguments, num_warps=num_warps, num_stages=num_stages, **constants)


def is_pointer(parameter: str) -> bool:
    """Returns True for the name of a kernel's parameter that is a pointer."""
    return parameter.endswith("_ptr")
