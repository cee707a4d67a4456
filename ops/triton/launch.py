"""Kernels, and their launches.

A kernel's pointers end in `_ptr`. Integers and floats are never specialized: a value that is 1, or divisible by 16,
compiles no new variant while requests wait. So a kernel states divisibility itself, with `size // 8 * 8`: the compiler
ignores `tl.multiple_of` of an argument. Constants are annotated `tl.constexpr`, come last, and from a closed set of
values. A scalar that may exceed 2³¹ - 1 is annotated `tl.int64`; other parameters have no annotation.
"""

import functools
import os
from typing import Any

import torch

from quire.ops.triton.kernel_function import KernelFunction
from quire.ops.triton.launcher import Launcher


class Kernel(KernelFunction):
    """A Triton kernel: `kernel(grid, *arguments, num_warps=..., num_stages=..., **constants)` launches it."""

    def __call__(
        self, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
    ) -> None:
        launcher = launcher_of_process()
        if launcher is None:
            self.function[grid](*arguments, num_warps=num_warps, num_stages=num_stages, **constants)
        else:
            launcher.launch(self, grid, arguments, num_warps, num_stages, constants)


@functools.cache
def launcher_of_process() -> Launcher | None:
    """The launcher of kernels that are compiled ahead; None where Triton launches them itself.

    That is so in the interpreter, on AMD's cards, and with `QUIRE_TRITON_LAUNCHER=jit`.
    """
    wanted = os.environ.get("QUIRE_TRITON_LAUNCHER", os.environ.get("VLLM_TRITON_LAUNCHER", ""))
    is_interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if is_interpreted or wanted == "jit" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return Launcher.of_this_card()
