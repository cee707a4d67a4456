"""Recurrent operations as kernels: of decode steps, one token a row, and of prompts."""

from typing import Literal

import torch
import triton
from torch import Tensor

from quire.ops.eager.recurrent import EagerRecurrent
from quire.ops.recurrent import DeltaRuleCall, GateActivation, RgLruCall, ScanCall, SsdCall, StateRows
from quire.ops.triton.convolution import CHANNELS, convolve_token, convolve_tokens, keep_inputs
from quire.ops.triton.decayed_products import DecayedProducts, update
from quire.ops.triton.gated_norm import norm_warps, normalize_gated
from quire.ops.triton.matrix_memory import remember
from quire.ops.triton.scans import LONE_CHANNELS, SCANNED_CHANNELS, average_tokens, gate_tokens, scan_tokens
from quire.ops.triton.state_rows import as_bytes, starts_there, with_dense_tokens

_MAX_KEYS = 256
_MAX_GROUP = 16384


class TritonRecurrent(EagerRecurrent):
    """What no kernel takes is left to plain torch, such as states of more than 256 keys.

    Args:
        is_invariant: a prompt's bits do not depend on how it is cut into steps.
    """

    def __init__(self, *, is_invariant: bool = False) -> None:
        self._in_chunks = not is_invariant

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
        x, starts = with_dense_tokens(x), starts_there(x, rows)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_blocks, is_even = triton.cdiv(x.shape[1], CHANNELS), x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0
        form = {"WIDTH": len(weight), "IS_EVEN": is_even, "CHANNELS": CHANNELS, "num_warps": 1, "num_stages": 1}
        is_activated, is_new = activation == "silu", as_bytes(rows.is_new)
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
        x, dt, b, c, gate = map(with_dense_tokens, (x, dt, b, c, gate))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scan_tokens(
            (len(rows.slots), triton.cdiv(x.shape[1], SCANNED_CHANNELS)), x, dt, dt_bias, a, b, c, d, gate, state,
            rows.slots, as_bytes(rows.is_new), starts_there(x, rows), out, x.shape[1], len(a),
            *(each.stride(0) for each in (x, dt, b, c, gate)),
            IS_EVEN=x.shape[1] % 8 == 0, SIZE=triton.next_power_of_2(len(a)), CHANNELS=SCANNED_CHANNELS, num_stages=1,
        )  # fmt: skip
        return out

    def ssd(self, call: SsdCall, state: Tensor, rows: StateRows) -> Tensor:
        x, dt, dt_bias, dt_limit, a, b, c, d = call
        if not _is_covered(x, state) or state.shape[2] > _MAX_KEYS:
            return super().ssd(call, state, rows)
        own = DecayedProducts("ssd", c, b, x, a, dt=dt, dt_bias=dt_bias, d=d, limits=dt_limit)
        return update(own, state, rows, in_chunks=self._in_chunks)

    def lightning_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, rows: StateRows
    ) -> Tensor:
        if not _is_covered(q, state) or state.shape[2] > _MAX_KEYS:
            return super().lightning_attention(q, k, v, log_decay, state, rows)
        return update(DecayedProducts("lightning", q, k, v, log_decay), state, rows, in_chunks=self._in_chunks)

    def gated_delta_rule(self, call: DeltaRuleCall, state: Tensor, rows: StateRows) -> Tensor:
        q, k, v, dt, dt_bias, a, beta, least_log_decay, beta_scale = call
        if not _is_covered(q, state) or state.shape[2] > _MAX_KEYS:
            return super().gated_delta_rule(call, state, rows)
        own = DecayedProducts(
            "delta", q, k, v, a, dt=dt, dt_bias=dt_bias, beta=beta, least=least_log_decay, beta_scale=beta_scale
        )
        return update(own, state, rows, in_chunks=self._in_chunks)

    def mlstm(
        self, q: Tensor, k: Tensor, v: Tensor, add: Tensor, keep: Tensor, state: Tensor, rows: StateRows, *, eps: float
    ) -> Tensor:
        if not _is_covered(q, state) or q.shape[2] > _MAX_KEYS:
            return super().mlstm(q, k, v, add, keep, state, rows, eps=eps)
        return remember(q, k, v, add, keep, state, rows, eps)

    def wkv(self, k: Tensor, v: Tensor, first: Tensor, log_decay: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        if not _is_covered(k, state, first, log_decay):
            return super().wkv(k, v, first, log_decay, state, rows)
        k, v = with_dense_tokens(k), with_dense_tokens(v)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        average_tokens(
            (len(rows.slots), triton.cdiv(k.shape[1], LONE_CHANNELS)), k, v, first, log_decay, state, rows.slots,
            as_bytes(rows.is_new), starts_there(k, rows), out, k.shape[1], k.stride(0), v.stride(0),
            CHANNELS=LONE_CHANNELS, num_stages=1,
        )  # fmt: skip
        return out

    def rg_lru(self, call: RgLruCall, state: Tensor, rows: StateRows) -> Tensor:
        x, input_gate, input_bias, decay_gate, decay_bias, log_decay = call
        if not _is_covered(x, state, input_bias, decay_bias, log_decay):
            return super().rg_lru(call, state, rows)
        x, input_gate, decay_gate = with_dense_tokens(x), with_dense_tokens(input_gate), with_dense_tokens(decay_gate)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        gate_tokens(
            (len(rows.slots), triton.cdiv(x.shape[1], LONE_CHANNELS)), x, input_gate, input_bias, decay_gate,
            decay_bias, log_decay, state, rows.slots, as_bytes(rows.is_new), starts_there(x, rows), out, x.shape[1],
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
        x, gate, weight = with_dense_tokens(x), with_dense_tokens(gate), weight.contiguous()
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
