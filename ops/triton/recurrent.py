"""Recurrent operations as kernels: of decode steps, one token a row, and of prompts."""

from typing import Literal

import torch
import triton
from torch import Tensor

from quire.ops.eager.recurrent import EagerRecurrent
from quire.ops.recurrent import DeltaRuleCall, GateActivation, RgLruCall, ScanCall, SsdCall, StateRows
from quire.ops.triton.convolution import CHANNELS, convolve_token, convolve_tokens, keep_inputs
from quire.ops.triton.gated_norm import norm_warps, normalize_gated
from quire.ops.triton.outer_products import VALUE_COLUMNS, update_outer_products
from quire.ops.triton.scans import LONE_CHANNELS, SCANNED_CHANNELS, average_tokens, gate_tokens, scan_tokens

_MAX_KEYS = 256
_MAX_GROUP = 16384


class TritonRecurrent(EagerRecurrent):
    """What no kernel takes is left to plain torch: the matrix memory of xLSTM, and states of more than 256 keys."""

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
        if not _is_covered(x, state):
            return super().causal_conv1d(x, weight, bias, state, rows, activation=activation)
        x, starts = _dense(x), _starts(x, rows)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_blocks, is_even = triton.cdiv(x.shape[1], CHANNELS), x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0
        form = {"WIDTH": len(weight), "IS_EVEN": is_even, "CHANNELS": CHANNELS, "num_warps": 1, "num_stages": 1}
        is_activated, is_new = activation == "silu", _bytes(rows.is_new)
        if starts is None:
            convolve_token(
                (len(x), num_blocks), x, weight, bias, state, rows.slots, is_new, out, x.shape[1], x.stride(0),
                IS_ACTIVATED=is_activated, **form,
            )  # fmt: skip
            return out
        convolve_tokens(
            (len(x), num_blocks), x, weight, bias, state, rows.slots, is_new, starts, out, len(starts) - 1, x.shape[1],
            x.stride(0), IS_ACTIVATED=is_activated, **form,
        )  # fmt: skip
        if len(weight) > 1:
            grid = (len(starts) - 1, num_blocks)
            keep_inputs(grid, x, state, rows.slots, is_new, starts, x.shape[1], x.stride(0), **form)
        return out

    def selective_scan(self, call: ScanCall, state: Tensor, rows: StateRows) -> Tensor:
        x, dt, dt_bias, a, b, c, d, gate = call
        if not _is_covered(x, state, a):
            return super().selective_scan(call, state, rows)
        x, dt, b, c, gate = map(_dense, (x, dt, b, c, gate))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scan_tokens(
            (len(rows.slots), triton.cdiv(x.shape[1], SCANNED_CHANNELS)), x, dt, dt_bias, a, b, c, d, gate, state,
            rows.slots, _bytes(rows.is_new), _starts(x, rows), out, x.shape[1], len(a),
            *(each.stride(0) for each in (x, dt, b, c, gate)),
            IS_EVEN=x.shape[1] % 8 == 0, SIZE=triton.next_power_of_2(len(a)), CHANNELS=SCANNED_CHANNELS, num_stages=1,
        )  # fmt: skip
        return out

    def ssd(self, call: SsdCall, state: Tensor, rows: StateRows) -> Tensor:
        x, dt, dt_bias, dt_limit, a, b, c, d = call
        if not _is_covered(x, state) or state.shape[2] > _MAX_KEYS:
            return super().ssd(call, state, rows)
        return _update("ssd", c, b, x, a, state, rows, dt=dt, dt_bias=dt_bias, d=d, limits=dt_limit)

    def lightning_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, rows: StateRows
    ) -> Tensor:
        if not _is_covered(q, state) or state.shape[2] > _MAX_KEYS:
            return super().lightning_attention(q, k, v, log_decay, state, rows)
        return _update("lightning", q, k, v, log_decay, state, rows)

    def gated_delta_rule(self, call: DeltaRuleCall, state: Tensor, rows: StateRows) -> Tensor:
        q, k, v, dt, dt_bias, a, beta, least_log_decay, beta_scale = call
        if not _is_covered(q, state) or state.shape[2] > _MAX_KEYS:
            return super().gated_delta_rule(call, state, rows)
        return _update(
            "delta", q, k, v, a, state, rows, dt=dt, dt_bias=dt_bias, beta=beta, least=least_log_decay,
            beta_scale=beta_scale,
        )  # fmt: skip

    def wkv(self, k: Tensor, v: Tensor, first: Tensor, log_decay: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        if not _is_covered(k, state, first, log_decay):
            return super().wkv(k, v, first, log_decay, state, rows)
        k, v = _dense(k), _dense(v)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        average_tokens(
            (len(rows.slots), triton.cdiv(k.shape[1], LONE_CHANNELS)), k, v, first, log_decay, state, rows.slots,
            _bytes(rows.is_new), _starts(k, rows), out, k.shape[1], k.stride(0), v.stride(0),
            CHANNELS=LONE_CHANNELS, num_stages=1,
        )  # fmt: skip
        return out

    def rg_lru(self, call: RgLruCall, state: Tensor, rows: StateRows) -> Tensor:
        x, input_gate, input_bias, decay_gate, decay_bias, log_decay = call
        if not _is_covered(x, state, input_bias, decay_bias, log_decay):
            return super().rg_lru(call, state, rows)
        x, input_gate, decay_gate = _dense(x), _dense(input_gate), _dense(decay_gate)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        gate_tokens(
            (len(rows.slots), triton.cdiv(x.shape[1], LONE_CHANNELS)), x, input_gate, input_bias, decay_gate,
            decay_bias, log_decay, state, rows.slots, _bytes(rows.is_new), _starts(x, rows), out, x.shape[1],
            x.stride(0), input_gate.stride(0), decay_gate.stride(0), CHANNELS=LONE_CHANNELS, num_stages=1,
        )  # fmt: skip
        return out

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
        num_tokens, num_groups, size = x.shape
        if size > _MAX_GROUP or num_tokens == 0:
            return super().gated_rms_norm(x, gate, weight, eps, gate_first=gate_first, activation=activation)
        x, gate, weight = _dense(x), _dense(gate), weight.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        columns = triton.next_power_of_2(size)
        normalize_gated(
            (num_tokens, num_groups), x, gate, weight, out, num_groups, weight.numel() // size, size, x.stride(0),
            gate.stride(0), eps, IS_GATE_FIRST=gate_first, ACTIVATION=activation,
            IS_EVEN=not any(each % 8 for each in (size, x.stride(0), gate.stride(0))), SIZE=columns,
            num_warps=norm_warps(columns), num_stages=1,
        )  # fmt: skip
        return out


def _is_covered(x: Tensor, *held: Tensor) -> bool:
    """Returns True if there are tokens, and what is `held` is dense."""
    return len(x) > 0 and all(each.is_contiguous() for each in held)


def _starts(x: Tensor, rows: StateRows) -> Tensor | None:
    """The rows' first tokens in `x`, and the end, on the device; None if each row has one token."""
    if len(x) == len(rows.starts) - 1:
        return None
    return rows.starts.to(x.device) if rows.starts_there is None else rows.starts_there


def _dense(x: Tensor) -> Tensor:
    """`x` with dense tokens, which may lie apart."""
    return x if x[:1].is_contiguous() else x.contiguous()


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)


def _update(
    form: Literal["delta", "ssd", "lightning"],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    state: Tensor,
    rows: StateRows,
    *,
    dt: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta: Tensor | None = None,
    d: Tensor | None = None,
    limits: tuple[float, float] = (0.0, 0.0),
    least: float | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    q, k, v, beta = _dense(q), _dense(k), _dense(v), None if beta is None else _dense(beta)
    dt = None if dt is None else _dense(dt)
    num_heads, key_dim, value_dim = state.shape[1:]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    strides = [stride for each in (q, k, v) for stride in each.stride()[:2]]
    strides += (0, 0) if dt is None else dt.stride()[:2]
    strides.append(0 if beta is None else beta.stride(0))
    low, high = limits if least is None else (least, 0.0)
    keys = triton.next_power_of_2(key_dim)
    update_outer_products(
        (len(rows.slots), num_heads, triton.cdiv(value_dim, VALUE_COLUMNS)), q, k, v, dt, dt_bias, a, beta, d, state,
        rows.slots, _bytes(rows.is_new), _starts(q, rows), out, num_heads, num_heads // q.shape[1], key_dim, value_dim,
        *strides, low, high, beta_scale, FORM=form, HAS_CHANNEL_DECAY=dt is not None and dt.dim() == 3,
        HAS_LEAST_DECAY=least is not None, IS_EVEN=key_dim == keys and value_dim % VALUE_COLUMNS == 0, KEYS=keys,
        VALUES=VALUE_COLUMNS, num_stages=1,
    )  # fmt: skip
    return out
