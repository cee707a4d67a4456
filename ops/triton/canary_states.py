"""The canary's case of recurrent layers."""

from typing import Any

import torch
from torch import Tensor

from quire.ops.backend import Backend
from quire.ops.recurrent import DeltaRuleCall, ScanCall, SsdCall, StateRows
from quire.ops.triton.canary_inputs import Inputs


def recurrent(num_tokens: int, ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    """Two rows, of one token and of the others."""
    heads, size, channels = 4, 128, 256
    lengths = torch.tensor([1] * num_tokens if num_tokens < 3 else [1, num_tokens - 1])
    starts, slots = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))), make.place(range(len(lengths)), torch.int64)
    rows = StateRows(slots, starts, make.place([number == 0 for number in range(len(lengths))], torch.bool))
    tokens = int(lengths.sum())

    def floats(*shape: int) -> Tensor:
        return make.normal(*shape).float()

    def decays(*shape: int) -> Tensor:
        return -floats(*shape).abs()

    results: list[Tensor] = []
    state = make.normal(2, 3, channels)
    x = make.normal(tokens, channels)
    results += [ops.recurrent.causal_conv1d(x, make.normal(4, channels), None, state, rows, activation="silu"), state]
    state, of_channels = floats(2, 16, channels), (make.normal(tokens, channels) for _ in range(2))
    b, c = make.normal(tokens, 16), make.normal(tokens, 16)
    dt, gate = of_channels
    scanned = ScanCall(x, dt, floats(channels), decays(16, channels), b, c, floats(channels), gate)
    results += [ops.recurrent.selective_scan(scanned, state, rows), state]
    state, (q, k, v) = floats(2, heads, size, size), (make.normal(tokens, heads, size) for _ in range(3))
    dt, beta, a = make.normal(tokens, heads), make.normal(tokens, heads), decays(heads)
    call = SsdCall(v, dt, floats(heads), (0.01, 2.0), a, q, k, floats(heads))
    results += [ops.recurrent.ssd(call, state, rows), state]
    state = floats(2, heads, size, size)
    results += [ops.recurrent.gated_delta_rule(DeltaRuleCall(q, k, v, dt, floats(heads), a, beta), state, rows), state]
    weight = make.normal(heads, size)
    return [*results, ops.recurrent.gated_rms_norm(q, k, weight, 1e-6, gate_first=False)]


def chunks(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    """A prompt of two chunks, the second of which is not whole, after a row of one token."""
    heads, size, tokens = 1, 128, 90
    slots, new = make.place([1, 0], torch.int64), make.place([False, True], torch.bool)
    rows = StateRows(slots, torch.tensor([0, 1, tokens]), new)
    q, k, v = (make.normal(tokens, heads, size) for _ in range(3))
    dt, beta, a = make.normal(tokens, heads), make.normal(tokens, heads), -make.normal(heads).float().abs()
    bias, results = make.normal(heads).float(), []
    state = make.normal(2, heads, size, size).float()
    results += [ops.recurrent.gated_delta_rule(DeltaRuleCall(q, k, v, dt, bias, a, beta), state, rows), state]
    state = make.normal(2, heads, size, size).float()
    scale = size**-0.25
    call = SsdCall(v, dt, bias, (0.01, 2.0), a, q * scale, k * scale, bias)
    return [*results, ops.recurrent.ssd(call, state, rows), state]
