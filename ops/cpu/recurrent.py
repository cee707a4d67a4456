"""Recurrent operations with the C++ kernels of `recurrent.cpp` and `gates.cpp`; torch takes what they do not cover.

The kernels process a row's tokens one after another, also in prompts. A head's state stays in the L1 cache, so a token
costs about as much arithmetic as in a chunked form with matrix products.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from quire.ops.cpu import calls
from quire.ops.cpu.calls import DTYPES
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.launches import Launcher
from quire.ops.recurrent import (
    DeltaRuleCall,
    GateActivation,
    RecurrentOperations,
    RgLruCall,
    ScanCall,
    SsdCall,
    StateRows,
)

_GATES: tuple[GateActivation, ...] = ("silu", "sigmoid", "identity", "softplus")
"""In the kernel's numbering."""


class NativeRecurrent(RecurrentOperations):
    def __init__(self, launcher: Launcher, eager: RecurrentOperations, fallbacks: Fallbacks) -> None:
        """`eager` takes the calls that the kernels do not cover."""
        self._launcher = launcher
        self._empty = launcher.empty
        self._eager = eager
        self._fallbacks = fallbacks
        self._causal_conv1d = launcher.bind(calls.CAUSAL_CONV1D)
        self._selective_scan = launcher.bind(calls.SELECTIVE_SCAN)
        self._outer_products = launcher.bind(calls.OUTER_PRODUCTS)
        self._mlstm = launcher.bind(calls.MLSTM)
        self._wkv = launcher.bind(calls.WKV)
        self._rg_lru = launcher.bind(calls.RG_LRU)
        self._gated_rms_norm = launcher.bind(calls.GATED_RMS_NORM)
        self._multiply_gate = launcher.bind(calls.MULTIPLY_GATE)

    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        rows: StateRows,
        *,
        activation: Literal["silu"] | None = None,
    ) -> Tensor:
        parts = (x, weight, state) if bias is None else (x, weight, state, bias)
        if x.stride(1) == 1 and _have_dtype(x.dtype, *parts) and _are_dense(*parts[1:]):
            out = self._empty(*x.shape, dtype=x.dtype)
            if not self._causal_conv1d(
                x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), state.data_ptr(),
                out.data_ptr(), *self._pointers(rows), len(rows.slots), x.shape[1], len(weight), x.stride(0),
                activation == "silu", DTYPES[x.dtype], torch.get_num_threads(),
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.causal_conv1d, x, weight, bias, state, rows, activation=activation)

    def selective_scan(self, call: ScanCall, state: Tensor, rows: StateRows) -> Tensor:
        x, dt, dt_bias, a, b, c, d, gate = call
        parts, wide = (x, dt, b, c, gate), (dt_bias, a, d, state)
        if all(part.stride(1) == 1 for part in parts) and _are_covered(parts, wide):
            out = self._empty(*x.shape, dtype=x.dtype)
            if not self._selective_scan(
                *(part.data_ptr() for part in (*parts, *wide, out)), *self._pointers(rows), len(rows.slots),
                x.shape[1], len(a), *(part.stride(0) for part in parts), DTYPES[x.dtype], torch.get_num_threads(),
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.selective_scan, call, state, rows)

    def ssd(self, call: SsdCall, state: Tensor, rows: StateRows) -> Tensor:
        x, dt, dt_bias, dt_limit, a, b, c, d = call
        out = self._add_up(c, b, x, dt, None, dt_bias, a, d, state, rows, (*dt_limit, 0.0, 1.0))
        if out is not None:
            return out
        return self._fallbacks.run(self._eager.ssd, call, state, rows)

    def lightning_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, rows: StateRows
    ) -> Tensor:
        out = self._add_up(q, k, v, None, None, None, log_decay, None, state, rows)
        if out is not None:
            return out
        return self._fallbacks.run(self._eager.lightning_attention, q, k, v, log_decay, state, rows)

    def gated_delta_rule(self, call: DeltaRuleCall, state: Tensor, rows: StateRows) -> Tensor:
        q, k, v, dt, dt_bias, a, beta, least_log_decay, beta_scale = call
        bounds = (0.0, math.inf, least_log_decay or 0.0, beta_scale)
        out = self._add_up(q, k, v, dt, beta, dt_bias, a, None, state, rows, bounds)
        if out is not None:
            return out
        return self._fallbacks.run(self._eager.gated_delta_rule, call, state, rows)

    def _add_up(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dt: Tensor | None,
        beta: Tensor | None,
        dt_bias: Tensor | None,
        a: Tensor,
        d: Tensor | None,
        state: Tensor,
        rows: StateRows,
        bounds: tuple[float, float, float, float] = (0.0, math.inf, 0.0, 1.0),
    ) -> Tensor | None:
        """Runs a state of decayed outer products; None if the kernel does not take these tensors.

        `bounds` are the kernel's dt_low, dt_high, least_log_decay and beta_scale.
        """
        parts, wide = [x for x in (q, k, v, dt, beta) if x is not None], [x for x in (dt_bias, a, d) if x is not None]
        dense = all(x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2]) for x in parts)
        if not dense or not _are_covered(parts, [*wide, state]):
            return None
        out = self._empty(*v.shape, dtype=v.dtype)
        _, key_heads, key_dim = q.shape
        failed = self._outer_products(
            *(0 if x is None else x.data_ptr() for x in (q, k, v, dt, beta, dt_bias, a, d, state, out)),
            *self._pointers(rows), len(rows.slots), v.shape[1], key_heads, key_dim, v.shape[2],
            1 if dt is None or dt.dim() == 2 else key_dim,
            *(0 if x is None else x.stride(0) for x in (q, k, v, dt, beta)), DTYPES[v.dtype], torch.get_num_threads(),
            *bounds,
        )  # fmt: skip
        return None if failed else out

    def wkv(self, k: Tensor, v: Tensor, first: Tensor, log_decay: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        wide = (first, log_decay, state)
        if k.stride(1) == v.stride(1) == 1 and _are_covered((k, v), wide):
            out = self._empty(*v.shape, dtype=v.dtype)
            if not self._wkv(
                *(part.data_ptr() for part in (k, v, *wide, out)), *self._pointers(rows), len(rows.slots), v.shape[1],
                k.stride(0), v.stride(0), DTYPES[v.dtype], torch.get_num_threads(),
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.wkv, k, v, first, log_decay, state, rows)

    def mlstm(
        self, q: Tensor, k: Tensor, v: Tensor, add: Tensor, keep: Tensor, state: Tensor, rows: StateRows, *, eps: float
    ) -> Tensor:
        num_tokens, heads, value_dim = v.shape
        dense = all(x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in (q, k, v))
        if dense and add.stride(1) == keep.stride(1) == 1 and _are_covered((v, q, k, add, keep), (state,)):
            out = self._empty(num_tokens, heads, value_dim, dtype=v.dtype)
            if not self._mlstm(
                *(part.data_ptr() for part in (q, k, v, add, keep, state, out)), *self._pointers(rows),
                len(rows.slots), heads, q.shape[2], value_dim, *(part.stride(0) for part in (q, k, v, add, keep)),
                DTYPES[v.dtype], torch.get_num_threads(), eps,
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.mlstm, q, k, v, add, keep, state, rows, eps=eps)

    def rg_lru(self, call: RgLruCall, state: Tensor, rows: StateRows) -> Tensor:
        x, input_gate, input_bias, decay_gate, decay_bias, log_decay = call
        parts, wide = (x, input_gate, decay_gate), (input_bias, decay_bias, log_decay, state)
        if all(part.stride(1) == 1 for part in parts) and _are_covered(parts, wide):
            out = self._empty(*x.shape, dtype=x.dtype)
            if not self._rg_lru(
                *(part.data_ptr() for part in (*parts, *wide, out)), *self._pointers(rows), len(rows.slots),
                x.shape[1], *(part.stride(0) for part in parts), DTYPES[x.dtype], torch.get_num_threads(),
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.rg_lru, call, state, rows)

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        *,
        gate_first: bool,
        activation: GateActivation = "silu",
    ) -> Tensor:
        _, groups, size = x.shape
        dense = all(part.stride(2) == 1 and part.stride(1) == size for part in (x, gate)) and _are_dense(weight)
        if dense and _have_dtype(x.dtype, gate, weight):
            out = self._empty(*x.shape, dtype=x.dtype)
            if not self._gated_rms_norm(
                x.data_ptr(), gate.data_ptr(), weight.data_ptr(), out.data_ptr(), len(x), groups, size, x.stride(0),
                gate.stride(0), size if weight.dim() == 2 else 0, gate_first, _GATES.index(activation),
                DTYPES[x.dtype], torch.get_num_threads(), eps,
            ):  # fmt: skip
                return out
        return self._fallbacks.run(
            self._eager.gated_rms_norm, x, gate, weight, eps, gate_first=gate_first, activation=activation
        )

    def multiply_gate(self, x: Tensor, gate: Tensor, activation: GateActivation) -> Tensor:
        if x.stride(1) == 1 and gate.stride(1) == 1 and _have_dtype(x.dtype, gate):
            out = self._empty(*x.shape, dtype=x.dtype)
            if not self._multiply_gate(
                x.data_ptr(), gate.data_ptr(), out.data_ptr(), *x.shape, gate.shape[1], x.stride(0), gate.stride(0),
                _GATES.index(activation), DTYPES[x.dtype], torch.get_num_threads(),
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.multiply_gate, x, gate, activation)

    def _pointers(self, rows: StateRows) -> tuple[int, int, int]:
        self._launcher.keep(rows)
        return rows.slots.data_ptr(), rows.starts.data_ptr(), rows.is_new.data_ptr()


def _have_dtype(dtype: torch.dtype, *tensors: Tensor) -> bool:
    return dtype in DTYPES and all(x.dtype == dtype for x in tensors)


def _are_dense(*tensors: Tensor) -> bool:
    return all(x.is_contiguous() for x in tensors)


def _are_covered(parts: Sequence[Tensor], wide: Sequence[Tensor]) -> bool:
    """Returns True if the inputs by token have one dtype, and parameters and state are dense and in float32."""
    return _have_dtype(parts[0].dtype, *parts) and _have_dtype(torch.float32, *wide) and _are_dense(*wide)
