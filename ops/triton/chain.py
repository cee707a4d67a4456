"""The chain of a step's kernels: from sm_90 on, a kernel starts while the one before it still runs.

Its programs then prefetch weights, which no kernel of a step writes, and wait. So the gap between two kernels, as long
as a small kernel itself, has work in it (CUDA's programmatic dependent launch). A kernel that calls `wait_for_inputs`
is launched so; others start when those before them have ended.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIRST_CAPABILITY = 90

WAIT = "griddepcontrol.wait"
"""The instruction of PTX by which a kernel waits."""

LINE = tl.constexpr(64)
"""The 16-bit numbers of a line of the cache."""

_capability = 0


@contextmanager
def compiling_for(backend: str, target: int | str) -> Iterator[None]:
    """Says which card is compiled for; kernels that are compiled otherwise have no chain."""
    global _capability
    before, _capability = _capability, int(target) if backend == "cuda" else 0
    try:
        yield
    finally:
        _capability = before


@triton.constexpr_function
def has_chain():
    """Returns True if the card that is compiled for starts kernels before the end of others."""
    return _capability >= FIRST_CAPABILITY


@triton.jit
def wait_for_inputs():
    """Waits for the kernels before this one. Before, a program reads only weights, and writes nothing.

    Every program of a kernel calls it, because the next kernel counts on the end of all before this one, too.
    """
    if has_chain():
        gdc_wait()


@triton.jit
def start_next():
    """Lets the next kernel start once all programs of this one run; it waits for their end."""
    if has_chain():
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Fetches the lines of `pointers` into the card's second-level cache."""
    if has_chain():
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
