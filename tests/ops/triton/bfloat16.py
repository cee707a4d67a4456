"""bfloat16 in Triton's interpreter, made exact: it computes with the bit patterns, and truncates float32.

Operands are widened to float32, and results are rounded to the nearest even number, once an operation. A sum or a scan
is rounded once, at its end.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

_ARITHMETIC = (
    *("fadd", "fsub", "fmul", "fdiv", "frem", "fneg", "precise_divf", "approx_divf", "fma", "clampf"),
    *("minimumf", "maximumf", "minnumf", "maxnumf"),
)
_COMPARISONS = tuple(f"fcmp{order}{kind}" for order in "OU" for kind in ("LT", "GT", "LE", "GE", "EQ", "NE"))


def make_exact() -> None:
    """Replaces the interpreter's operations on bfloat16, in this process."""
    for names, are_rounded in ((_ARITHMETIC, True), (_COMPARISONS, False)):
        for name in names:
            method = f"create_{name}"
            if hasattr(InterpreterBuilder, method):  # releases differ
                setattr(InterpreterBuilder, method, _widened(getattr(InterpreterBuilder, method), are_rounded))
    InterpreterBuilder.create_dot = _widened(InterpreterBuilder.create_dot, are_rounded=False)
    InterpreterBuilder.cast_impl = _exact_cast(InterpreterBuilder.cast_impl)
    InterpreterBuilder.create_fp_to_fp = _exact_cast(InterpreterBuilder.create_fp_to_fp)
    for kind in (ReduceOps, ScanOps):
        kind.apply_impl = _widened_reduction(kind.apply_impl)


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _widen(value: Any) -> Any:
    if not _is_bfloat16(value) or value.data.dtype != np.uint16:
        return value
    return TensorHandle((np.asarray(value.data).astype(np.uint32) << 16).view(np.float32), tl.float32)


def _round(value: TensorHandle) -> TensorHandle:
    data = torch.from_numpy(np.ascontiguousarray(value.data, np.float32)).bfloat16()
    return TensorHandle(data.view(torch.int16).numpy().view(np.uint16).reshape(np.shape(value.data)), tl.bfloat16)


def _widened(compute: Callable[..., TensorHandle], are_rounded: bool) -> Callable[..., TensorHandle]:
    def run(self: InterpreterBuilder, *operands: Any) -> TensorHandle:
        result = compute(self, *map(_widen, operands))
        return _round(result) if are_rounded and any(map(_is_bfloat16, operands)) else result

    return run


def _exact_cast(cast: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def run(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype, *rounding: Any) -> TensorHandle:
        truncates = bool(rounding) and rounding[0] == interpreter._ir.ROUNDING_MODE.RTZ
        if target.scalar != tl.bfloat16 or truncates:
            return cast(self, _widen(source), target, *rounding)
        return _round(TensorHandle(np.asarray(_widen(source).data).astype(np.float32), tl.float32))

    return run


def _widened_reduction(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: ReduceOps | ScanOps, operands: tuple[tl.tensor, ...]) -> Any:
        if not any(_is_bfloat16(each.handle) for each in operands):
            return reduce(self, operands)
        results = reduce(self, tuple(_tensor(_widen(each.handle), each) for each in operands))
        if isinstance(results, tl.tensor):
            return _rounded(results)
        return [_rounded(each) for each in results]

    return run


def _rounded(value: tl.tensor) -> tl.tensor:
    return _tensor(_round(value.handle), value) if value.dtype == tl.float32 else value


def _tensor(handle: TensorHandle, like: tl.tensor) -> tl.tensor:
    scalar = handle.dtype.scalar
    return tl.tensor(handle, tl.block_type(scalar, list(like.shape)) if like.type.is_block() else scalar)
