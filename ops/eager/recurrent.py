"""Recurrent operations in plain torch, in float32.

Rows are computed side by side, padded with tokens that do not change a state: first those with one token, which are
decode steps, then the longer ones. Decayed outer products process a row in chunks, whose tokens are matrix products;
only the state passes from chunk to chunk.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.recurrent import (
    DeltaRuleCall,
    GateActivation,
    RecurrentOperations,
    RgLruCall,
    ScanCall,
    SsdCall,
    StateRows,
    store_states,
)

CHUNK = 64
CHANNEL_CHUNK = 16  # if each channel has a separate decay, between any two tokens of a chunk


class EagerRecurrent(RecurrentOperations):
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
        before = len(weight) - 1

        def convolve(x: Tensor, state: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.cat((state, x), dim=1)
            windows = x.unfold(1, len(weight), 1)  # [rows, length, channels, width]
            out = (windows.float() * weight.float().T).sum(-1)
            newest = lengths.unsqueeze(1) + torch.arange(before, device=x.device)
            return out, x.gather(1, newest.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

        out = _by_row(convolve, (x,), state, rows)
        if bias is not None:
            out = out + bias.float()
        return (F.silu(out) if activation == "silu" else out).to(x.dtype)

    def selective_scan(self, call: ScanCall, state: Tensor, rows: StateRows) -> Tensor:
        x, dt, dt_bias, a, b, c, d, gate = call

        def scan(x: Tensor, t: Tensor, b: Tensor, c: Tensor, state: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            outputs = []
            for token in range(
                x.shape[1]
            ):  # each channel and element has a separate decay, so there is no matrix product
                step = t[:, token].unsqueeze(1)
                state = torch.exp(step * a) * state + b[:, token].unsqueeze(2) * (step * x[:, token].unsqueeze(1))
                outputs.append((state * c[:, token].unsqueeze(2)).sum(1))
            return torch.stack(outputs, dim=1), state

        full = x.float()
        out = _by_row(scan, (full, F.softplus(dt.float() + dt_bias), b.float(), c.float()), state, rows)
        return ((out + d * full) * F.silu(gate.float())).to(x.dtype)

    def ssd(self, call: SsdCall, state: Tensor, rows: StateRows) -> Tensor:
        x, dt, dt_bias, dt_limit, a, b, c, d = call
        full, t = x.float(), F.softplus(dt.float() + dt_bias).clamp(*dt_limit)
        inputs = (c.float(), b.float(), full * t.unsqueeze(-1), (t * a).unsqueeze(-1))
        return (_by_row(_outer_products, inputs, state, rows) + full * d.unsqueeze(-1)).to(x.dtype)

    def lightning_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, rows: StateRows
    ) -> Tensor:
        inputs = (q.float(), k.float(), v.float(), log_decay.view(-1, 1).expand(len(q), -1, -1))
        return _by_row(_outer_products, inputs, state, rows).to(v.dtype)

    def gated_delta_rule(self, call: DeltaRuleCall, state: Tensor, rows: StateRows) -> Tensor:
        q, k, v, dt, dt_bias, a, beta, least_log_decay, beta_scale = call
        q = _unit(q.float()) * q.shape[-1] ** -0.5
        raw, a = (dt.float() + dt_bias).view(*beta.shape, -1), a.unsqueeze(-1)
        log_decay = F.softplus(raw) * a if least_log_decay is None else least_log_decay * (raw * -a).sigmoid()
        inputs = (q, _unit(k.float()), v.float(), log_decay, beta.float().sigmoid() * beta_scale)
        return _by_row(_outer_products, inputs, state, rows).to(v.dtype)

    def wkv(self, k: Tensor, v: Tensor, first: Tensor, log_decay: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        def average(k: Tensor, v: Tensor, state: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            outputs = []
            for token in range(k.shape[1]):
                key, value = k[:, token], v[:, token]
                total, weight, most = state.unbind(1)
                most = most.masked_fill(weight == 0, float("-inf"))  # nothing was added yet
                highest = torch.maximum(most, first + key)
                held, new = torch.exp(most - highest), torch.exp(first + key - highest)
                outputs.append((held * total + new * value) / (held * weight + new))
                highest = torch.maximum(most + log_decay, key)
                held, new = torch.exp(most + log_decay - highest), torch.exp(key - highest)
                updated = torch.stack((held * total + new * value, held * weight + new, highest), dim=1)
                state = torch.where((token < lengths).view(-1, 1, 1), updated, state)
            return torch.stack(outputs, dim=1), state

        return _by_row(average, (k.float(), v.float()), state, rows).to(v.dtype)

    def mlstm(
        self, q: Tensor, k: Tensor, v: Tensor, add: Tensor, keep: Tensor, state: Tensor, rows: StateRows, *, eps: float
    ) -> Tensor:
        def remember(
            q: Tensor, k: Tensor, v: Tensor, add: Tensor, keep: Tensor, state: Tensor, lengths: Tensor
        ) -> tuple[Tensor, Tensor]:
            outputs = []
            for token in range(q.shape[1]):
                most = torch.maximum(keep[:, token] + state[..., -1, -1], add[:, token])
                held = torch.exp(keep[:, token] + state[..., -1, -1] - most)
                new = k[:, token] * torch.exp(add[:, token] - most).unsqueeze(-1)
                updated = torch.zeros_like(state)
                updated[..., :-1, :] = held[..., None, None] * state[..., :-1, :] + new.unsqueeze(-1) * v[
                    :, token
                ].unsqueeze(-2)
                updated[..., -1, -1] = most
                out = (q[:, token].unsqueeze(-1) * updated[..., :-1, :]).sum(-2)
                divisor = torch.maximum(out[..., -1].abs(), torch.exp(-most)) + eps
                outputs.append(out[..., :-1] / divisor.unsqueeze(-1))
                state = torch.where((token < lengths).view(-1, 1, 1, 1), updated, state)
            return torch.stack(outputs, dim=1), state

        inputs = (q.float() * q.shape[-1] ** -0.5, k.float(), F.pad(v.float(), (0, 1), value=1.0))
        return _by_row(remember, (*inputs, add.float(), F.logsigmoid(keep.float())), state, rows).to(v.dtype)

    def rg_lru(self, call: RgLruCall, state: Tensor, rows: StateRows) -> Tensor:
        x, input_gate, input_bias, decay_gate, decay_bias, log_decay = call

        def scan(added: Tensor, decay: Tensor, state: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            outputs = []
            for token in range(added.shape[1]):  # zeros after a row's last token keep its state: their decay is 0
                state = decay[:, token].exp() * state + added[:, token]
                outputs.append(state)
            return torch.stack(outputs, dim=1), state

        decay = (decay_gate.float() + decay_bias).sigmoid() * log_decay
        factor = (-torch.expm1(2 * decay)).sqrt()
        if len(rows.is_new) == len(x):  # a decode step: nothing goes to the device
            factor = _ones(factor, rows.is_new)
        else:
            starts = rows.starts[:-1].to(x.device)
            factor[starts] = _ones(factor[starts], rows.is_new)
        added = x.float() * (input_gate.float() + input_bias).sigmoid() * factor
        return _by_row(scan, (added, decay), state, rows).to(x.dtype)

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
        full, factor = x.float(), _FACTORS[activation](gate.float())
        if gate_first:
            full = full * factor
        out = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps) * weight.float()
        return (out if gate_first else out * factor).to(x.dtype)

    def multiply_gate(self, x: Tensor, gate: Tensor, activation: GateActivation) -> Tensor:
        factors = _FACTORS[activation](gate.float()).unsqueeze(2)
        return (x.float().unflatten(1, (gate.shape[1], -1)) * factors).flatten(1).to(x.dtype)


_FACTORS: dict[GateActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "sigmoid": torch.sigmoid, "identity": lambda gate: gate, "softplus": F.softplus,
}  # fmt: skip


def _by_row(
    compute: Callable[..., tuple[Tensor, Tensor]], inputs: tuple[Tensor, ...], state: Tensor, rows: StateRows
) -> Tensor:
    """`compute` on the rows of a step: [num_tokens, ...], float32.

    `compute` takes the inputs as [num_rows, length, ...] with zeros after a row's last token, the rows' states, and
    their lengths [num_rows] on the device; it returns the outputs and the states after each row's last token.
    """
    starts = rows.starts
    lengths = starts.diff()
    if len(lengths) == len(inputs[0]):  # a decode step, of which nothing has to be known on the host
        before = _zero(state[rows.slots], rows.is_new)
        out, after = compute(*(x.unsqueeze(1) for x in inputs), before, torch.ones_like(rows.slots))
        store_states(state, rows, after)
        return out.squeeze(1)
    outputs: list[tuple[Tensor, Tensor]] = []
    for chosen in ((lengths == 1).nonzero().flatten(), (lengths > 1).nonzero().flatten()):
        if not len(chosen):
            continue
        places = torch.arange(int(lengths[chosen].max())).expand(len(chosen), -1)
        is_padding = places >= lengths[chosen].unsqueeze(1)
        tokens = (starts[chosen].unsqueeze(1) + places).masked_fill(is_padding, 0).to(state.device)
        valid = (~is_padding).flatten().nonzero().squeeze(1).to(state.device)
        is_padding = is_padding.to(state.device)
        padded = (_zero(x[tokens], is_padding) for x in inputs)
        index = chosen.to(state.device)
        slots = rows.slots[index]
        before = _zero(state[slots], rows.is_new[index])
        out, state[slots] = compute(*padded, before, lengths[chosen].to(state.device))
        outputs.append((tokens.flatten()[valid], out.flatten(0, 1)[valid]))
    result = torch.empty((len(inputs[0]), *outputs[0][1].shape[1:]), device=state.device)
    for tokens, out in outputs:
        result[tokens] = out
    return result


def _zero(x: Tensor, is_zero: Tensor) -> Tensor:
    """`x` with zeros where `is_zero`, whose dimensions are the first of `x`, is set."""
    return x.masked_fill(is_zero.reshape(is_zero.shape + (1,) * (x.dim() - is_zero.dim())), 0)


def _ones(x: Tensor, is_one: Tensor) -> Tensor:
    return x.masked_fill(is_one.unsqueeze(1), 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _outer_products(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """A state of decayed outer products, chunk by chunk (arXiv:2405.21060, section 6; arXiv:2412.06464, section 3).

    `rest` is `state, lengths`, or `beta, state, lengths` for the delta rule. `q` and `k` are [rows, length, groups,
    key_dim], `v` is [rows, length, heads, value_dim], `log_decay` is [rows, length, heads, 1 or key_dim], `beta` is
    [rows, length, heads].
    """
    *betas, state, _ = rest
    share = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(share, dim=2) if share > 1 else x for x in (q, k))
    by_head = [x.transpose(1, 2) for x in (q, k, v, log_decay, *betas)]  # [rows, heads, length, ...]
    size = CHUNK if log_decay.shape[-1] == 1 else CHANNEL_CHUNK
    outputs = []
    for chunk in zip(*(x.split(size, dim=2) for x in by_head), strict=True):
        out, state = _chunk(state, *chunk)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2), state


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs of one chunk and the state after it; all dimensions are [rows, heads, length, ...]."""
    # Summed in float64: a decay between neighbours is a small difference of sums over the whole chunk.
    sums = log_decay.double().cumsum(-2)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1).unsqueeze(-1)
    between = (sums.unsqueeze(-2) - sums.unsqueeze(-3)).float().masked_fill(later, -torch.inf).exp()  # [.., i, j, ...]
    total = sums.float().exp()  # kept of the state at the chunk's start
    if beta is not None:
        v = _deltas(state, k, v, total, between, beta.unsqueeze(-1))
    out = _scores(q, k, between) @ v + (q * total) @ state
    left = (sums[..., -1:, :] - sums).float().exp()  # to the chunk's end
    return out, state * total[..., -1:, :].transpose(-1, -2) + (k * left).transpose(-1, -2) @ v


def _scores(q: Tensor, k: Tensor, between: Tensor) -> Tensor:
    """Products of the tokens' `q` and `k` [.., length, key_dim], [.., i, j], faded from token j to token i.

    `between` is [.., i, j, 1 or key_dim].
    """
    if between.shape[-1] == 1:
        return q @ k.transpose(-1, -2) * between.squeeze(-1)
    return (q.unsqueeze(-2) * k.unsqueeze(-3) * between).sum(-1)


def _deltas(state: Tensor, k: Tensor, v: Tensor, total: Tensor, between: Tensor, beta: Tensor) -> Tensor:
    """Computes the addition of each token at its key: its value minus the previous state's value there.

    That state contains the additions of the chunk's earlier tokens, which leads to a triangular system of equations.
    """
    earlier = (_scores(k, k, between) * beta).tril(-1)
    known = beta * (v - (k * total) @ state)
    return torch.linalg.solve_triangular(earlier + torch.eye(k.shape[2], device=k.device), known, upper=False)
