"""Recurrent operations against their formulas, token by token in float64: odd sizes, mixed rows, cuts of a prompt."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.backend import Backend
from quire.ops.cpu.native import NativeBackend
from quire.ops.recurrent import DeltaRuleCall, GateActivation, RgLruCall, ScanCall, SsdCall, StateRows

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
DTYPES = list(TOLERANCE)
FACTORS: dict[GateActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "sigmoid": torch.sigmoid, "identity": lambda gate: gate, "softplus": F.softplus,
}  # fmt: skip
NUM_SLOTS = 5

MIXED = (1, 70, 1, 3, 130)
"""Tokens of the rows of a step: decodes, a few tokens, and prompts longer than a chunk."""

Operation = Callable[[list[Tensor], Tensor, StateRows], Tensor]
"""Inputs by token, state, rows → outputs."""
Formula = Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]]
"""The inputs of one token and the state of its row, in float64 → output, state."""


class Case:
    """An operation, its formula for one token, and inputs by token."""

    def __init__(
        self, sizes: Sequence[tuple[int, ...]], state: tuple[int, ...], operation: Operation, formula: Formula
    ) -> None:
        self.sizes = sizes
        self.state = state
        self.operation = operation
        self.formula = formula

    def inputs(self, num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
        """Views with gaps between the tokens, as the parts of a projection are."""
        wide = [torch.randn(num_tokens, size[0] + 3, *size[1:]).to(dtype) for size in self.sizes]
        return [x[:, : size[0]] for x, size in zip(wide, self.sizes, strict=True)]

    def states(self, dtype: torch.dtype) -> Tensor:
        return torch.randn(NUM_SLOTS, *self.state).to(dtype)


def step_rows(lengths: Sequence[int], slots: Sequence[int] | None = None, is_new: bool = False) -> StateRows:
    slots = slots or list(range(len(lengths)))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return StateRows(torch.tensor(slots), starts, torch.full((len(lengths),), is_new))


def by_token(case: Case, inputs: list[Tensor], state: Tensor, rows: StateRows) -> tuple[Tensor, Tensor]:
    """Outputs and states by the formula."""
    state, outputs = state.double(), []
    for row, slot in enumerate(rows.slots.tolist()):
        current = torch.zeros_like(state[slot]) if rows.is_new[row] else state[slot]
        for token in range(int(rows.starts[row]), int(rows.starts[row + 1])):
            out, current = case.formula([x[token].double() for x in inputs], current)
            outputs.append(out)
        state[slot] = current
    return torch.stack(outputs), state


def convolution(ops: Backend, dtype: torch.dtype, channels: int, width: int, *, silu: bool, bias: bool) -> Case:
    weight = torch.randn(width, channels).to(dtype)
    bias_values = torch.randn(channels).to(dtype) if bias else None

    def operation(inputs: list[Tensor], state: Tensor, rows: StateRows) -> Tensor:
        return ops.recurrent.causal_conv1d(
            inputs[0], weight, bias_values, state, rows, activation="silu" if silu else None
        )

    def formula(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat((state, inputs[0].unsqueeze(0)))
        out = (seen * weight.double()).sum(0) + (0 if bias_values is None else bias_values.double())
        return F.silu(out) if silu else out, seen[1:]

    return Case([(channels,)], (width - 1, channels), operation, formula)


def mamba(ops: Backend, dtype: torch.dtype, channels: int, size: int) -> Case:
    a, dt_bias, d = -torch.rand(size, channels) * 4, torch.randn(channels), torch.randn(channels)

    def operation(inputs: list[Tensor], state: Tensor, rows: StateRows) -> Tensor:
        x, dt, gate, b, c = inputs
        return ops.recurrent.selective_scan(ScanCall(x, dt, dt_bias, a, b, c, d, gate), state, rows)

    def formula(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, gate, b, c = inputs
        t = F.softplus(dt + dt_bias)
        state = torch.exp(t * a) * state + t * x * b.unsqueeze(1)
        return ((state * c.unsqueeze(1)).sum(0) + d * x) * F.silu(gate), state

    return Case([(channels,)] * 3 + [(size,)] * 2, (size, channels), operation, formula)


def mamba2(ops: Backend, dtype: torch.dtype, heads: int, groups: int, key_dim: int, value_dim: int) -> Case:
    a, dt_bias, d, limit = -torch.rand(heads) * 2, torch.randn(heads), torch.randn(heads), (0.05, 2.0)

    def operation(inputs: list[Tensor], state: Tensor, rows: StateRows) -> Tensor:
        x, dt, b, c = inputs
        return ops.recurrent.ssd(SsdCall(x, dt, dt_bias, limit, a, b, c, d), state, rows)

    def formula(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, b, c = inputs
        t = F.softplus(dt + dt_bias).clamp(*limit)
        b, c = (part.repeat_interleave(heads // groups, dim=0) for part in (b, c))
        state = torch.exp(t * a)[:, None, None] * state + torch.einsum("h,hn,hp->hnp", t, b, x)
        return torch.einsum("hnp,hn->hp", state, c) + d[:, None] * x, state

    sizes = [(heads, value_dim), (heads,), (groups, key_dim), (groups, key_dim)]
    return Case(sizes, (heads, key_dim, value_dim), operation, formula)


def lightning(ops: Backend, dtype: torch.dtype, heads: int, key_dim: int, value_dim: int) -> Case:
    log_decay = -torch.rand(heads)

    def operation(inputs: list[Tensor], state: Tensor, rows: StateRows) -> Tensor:
        q, k, v = inputs
        return ops.recurrent.lightning_attention(q, k, v, log_decay, state, rows)

    def formula(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = inputs
        state = log_decay.exp()[:, None, None] * state + k[:, :, None] * v[:, None]
        return torch.einsum("hkv,hk->hv", state, q), state

    return Case([(heads, key_dim)] * 2 + [(heads, value_dim)], (heads, key_dim, value_dim), operation, formula)


def delta_rule(
    ops: Backend,
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    by_channel: bool = False,
    least: float | None = None,
    scale: float = 1.0,
) -> Case:
    size = (heads, key_dim) if by_channel else (heads,)
    a, dt_bias = -torch.rand(heads) * 2, torch.randn(size)

    def operation(inputs: list[Tensor], state: Tensor, rows: StateRows) -> Tensor:
        q, k, v, dt, beta = inputs
        return ops.recurrent.gated_delta_rule(DeltaRuleCall(q, k, v, dt, dt_bias, a, beta, least, scale), state, rows)

    def formula(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, dt, beta = inputs
        q, k = (F.normalize(part, dim=-1).repeat_interleave(heads // key_heads, dim=0) for part in (q, k))
        raw = (dt + dt_bias).view(heads, -1)
        log_decay = F.softplus(raw) * a[:, None] if least is None else least * (-a[:, None] * raw).sigmoid()
        state = log_decay.exp()[:, :, None] * state
        delta = scale * beta.sigmoid()[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * delta[:, None]
        return torch.einsum("hkv,hk->hv", state, q) * key_dim**-0.5, state

    sizes = [(key_heads, key_dim)] * 2 + [(heads, value_dim), size, (heads,)]
    return Case(sizes, (heads, key_dim, value_dim), operation, formula)


def matrix_memory(ops: Backend, dtype: torch.dtype, heads: int, key_dim: int, value_dim: int) -> Case:
    def operation(inputs: list[Tensor], state: Tensor, rows: StateRows) -> Tensor:
        return ops.recurrent.mlstm(*inputs, state, rows, eps=1e-3)

    def formula(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, add, keep = inputs
        memory, before = state[:, :-1], state[:, -1, -1]
        most = torch.maximum(F.logsigmoid(keep) + before, add)
        held, added = (x[:, None, None] for x in (keep.sigmoid() * (before - most).exp(), (add - most).exp()))
        memory = held * memory + added * torch.einsum("hk,hv->hkv", k, F.pad(v, (0, 1), value=1.0))
        out = torch.einsum("hkv,hk->hv", memory, q) * key_dim**-0.5
        state = torch.zeros_like(state)
        state[:, :-1], state[:, -1, -1] = memory, most
        return out[:, :-1] / (torch.maximum(out[:, -1].abs(), (-most).exp()) + 1e-3).unsqueeze(1), state

    sizes = [(heads, key_dim)] * 2 + [(heads, value_dim), (heads,), (heads,)]
    return MatrixMemory(sizes, (heads, key_dim + 1, value_dim + 1), operation, formula)


class MatrixMemory(Case):
    """One whose states have nothing in the places that no one reads."""

    def states(self, dtype: torch.dtype) -> Tensor:
        states = super().states(dtype)
        states[..., -1, :-1] = 0
        return states


class Averages(Case):
    """RWKV's; the weights in its states are positive."""

    def __init__(self, ops: Backend, dtype: torch.dtype, channels: int) -> None:
        first, log_decay = torch.randn(2, channels) * 3
        log_decay = -log_decay.exp()

        def operation(inputs: list[Tensor], state: Tensor, rows: StateRows) -> Tensor:
            return ops.recurrent.wkv(*inputs, first, log_decay, state, rows)

        def formula(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
            (k, v), factor = inputs, state[2].exp()
            total, weight, now = state[0] * factor, state[1] * factor, (first + k).exp()
            out = (total + now * v) / (weight + now)
            before = torch.where(state[1] == 0, -torch.inf, state[2])
            most = torch.maximum(before + log_decay, k)
            total, weight = (log_decay.exp() * part + k.exp() * x for part, x in ((total, v), (weight, 1.0)))
            return out, torch.stack((total / most.exp(), weight / most.exp(), most))

        super().__init__([(channels,)] * 2, (3, channels), operation, formula)

    def states(self, dtype: torch.dtype) -> Tensor:
        states = super().states(dtype)
        states[:, 1] = states[:, 1].abs() + 0.5
        return states


def rg_lru(ops: Backend, dtype: torch.dtype, channels: int) -> Case:
    input_bias, decay_bias, log_decay = torch.randn(channels), torch.randn(channels), -torch.rand(channels) * 4

    def operation(inputs: list[Tensor], state: Tensor, rows: StateRows) -> Tensor:
        x, input_gate, decay_gate = inputs
        call = RgLruCall(x, input_gate, input_bias, decay_gate, decay_bias, log_decay)
        return ops.recurrent.rg_lru(call, state, rows)

    def formula(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        x, input_gate, decay_gate = inputs
        decay = (log_decay * (decay_gate + decay_bias).sigmoid()).exp()
        factor = (1 - decay.square()).sqrt() if state.any() else 1.0  # only a new sequence begins with zeros
        state = decay * state + factor * x * (input_gate + input_bias).sigmoid()
        return state, state

    return Case([(channels,)] * 3, (channels,), operation, formula)


def test_averages_of_large_exponents(ops: Backend) -> None:
    """exp of a key overflows; the first token's output is its value, however small its own exponent."""
    k, v = torch.tensor([[-200.0, 300.0], [500.0, 0.0]]), torch.tensor([[2.0, 3.0], [5.0, 7.0]])
    state, rows = torch.full((1, 3, 2), torch.nan), step_rows((2,), is_new=True)
    out = ops.recurrent.wkv(k, v, torch.zeros(2), -torch.ones(2), state, rows)
    torch.testing.assert_close(out, torch.tensor([[2.0, 3.0], [5.0, 3.0]]))
    torch.testing.assert_close(state[0, 2], torch.tensor([500.0, 299.0]))


CASES: dict[str, tuple[Callable[[Backend, torch.dtype], Case], bool]] = {
    "convolution": (lambda ops, dtype: convolution(ops, dtype, 37, 4, silu=True, bias=True), False),
    "convolution of 64": (lambda ops, dtype: convolution(ops, dtype, 64, 3, silu=False, bias=False), False),
    "convolution of one token": (lambda ops, dtype: convolution(ops, dtype, 5, 1, silu=False, bias=True), False),
    "mamba": (lambda ops, dtype: mamba(ops, dtype, 32, 16), True),
    "mamba, odd": (lambda ops, dtype: mamba(ops, dtype, 19, 5), True),
    "mamba 2": (lambda ops, dtype: mamba2(ops, dtype, 4, 2, 16, 64), True),
    "mamba 2, odd": (lambda ops, dtype: mamba2(ops, dtype, 3, 1, 7, 21), True),
    "lightning attention": (lambda ops, dtype: lightning(ops, dtype, 2, 16, 16), True),
    "lightning attention, odd": (lambda ops, dtype: lightning(ops, dtype, 3, 9, 70), True),
    "averages": (lambda ops, dtype: Averages(ops, dtype, 64), True),
    "averages, odd": (lambda ops, dtype: Averages(ops, dtype, 37), True),
    "matrix memory": (lambda ops, dtype: matrix_memory(ops, dtype, 2, 16, 32), True),
    "matrix memory, odd": (lambda ops, dtype: matrix_memory(ops, dtype, 3, 7, 21), True),
    "gated linear unit": (lambda ops, dtype: rg_lru(ops, dtype, 64), True),
    "gated linear unit, odd": (lambda ops, dtype: rg_lru(ops, dtype, 37), True),
    "delta rule": (lambda ops, _: delta_rule(ops, 4, 2, 32, 32), True),
    "delta rule, odd": (lambda ops, _: delta_rule(ops, 3, 3, 5, 41, scale=2.0), True),
    "delta rule, bounded": (lambda ops, _: delta_rule(ops, 2, 1, 16, 16, least=-5.0), True),
    "delta rule by channel": (lambda ops, _: delta_rule(ops, 4, 2, 32, 32, by_channel=True, scale=2.0), True),
    "delta rule by channel, odd": (lambda ops, _: delta_rule(ops, 3, 3, 21, 41, by_channel=True, least=-5.0), True),
}
"""Name → case, and whether its state is float32 whatever the dtype."""


def make(name: str, ops: Backend, dtype: torch.dtype) -> tuple[Case, Tensor]:
    build, has_wide_state = CASES[name]
    case = build(ops, dtype)
    return case, case.states(torch.float32 if has_wide_state else dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_states_are_those_of_the_formula(ops: Backend, name: str, dtype: torch.dtype) -> None:
    case, state = make(name, ops, dtype)
    inputs, rows = case.inputs(sum(MIXED), dtype), step_rows(MIXED, [4, 0, 2, 1, 3])
    expected, expected_state = by_token(case, inputs, state, rows)
    out = case.operation(inputs, state, rows)
    assert out.dtype == dtype
    scale = expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype] * scale, rtol=TOLERANCE[dtype])
    torch.testing.assert_close(state.double(), expected_state, atol=1e-5 * scale, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_new_row_ignores_what_its_slot_holds(ops: Backend, name: str) -> None:
    case, state = make(name, ops, torch.float32)
    before = state.clone()
    state[1] = torch.nan
    inputs, rows = case.inputs(6, torch.float32), step_rows((1, 5), [3, 1])
    rows = rows._replace(is_new=torch.tensor([False, True]))
    expected, expected_state = by_token(case, inputs, before, rows)
    torch.testing.assert_close(case.operation(inputs, state, rows).double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.double(), expected_state, atol=1e-4, rtol=1e-4)
    assert torch.equal(state[[0, 2, 4]], before[[0, 2, 4]]), "other slots are untouched"


@pytest.mark.parametrize("name", CASES)
def test_a_cut_of_a_prompt_changes_no_output(ops: Backend, name: str) -> None:
    case, state = make(name, ops, torch.float32)
    inputs = case.inputs(150, torch.float32)
    whole = case.operation(inputs, state, step_rows((150,), [2], is_new=True))
    kept, parts, begin = state[2].clone(), [], 0
    for length in (1, 63, 7, 1, 78):
        rows = step_rows((length,), [2], is_new=begin == 0)
        parts.append(case.operation([x[begin : begin + length] for x in inputs], state, rows))
        begin += length
    scale = whole.abs().max().item()
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-6 * scale, rtol=1e-5)
    torch.testing.assert_close(state[2], kept, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_kernels_give_a_row_the_same_bits_in_any_cut_and_company(native: NativeBackend, name: str) -> None:
    case, state = make(name, native, torch.float32)
    inputs, in_parts = case.inputs(90, torch.float32), state.clone()
    whole = case.operation(inputs, state, step_rows((90,), [2]))
    first = case.operation([x[:41] for x in inputs], in_parts, step_rows((41,), [2]))
    beside = [torch.cat((x[7:30], x[41:])) for x in inputs]
    torch.set_num_threads(2)
    try:
        second = case.operation(beside, in_parts, step_rows((23, 49), [1, 2]))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(torch.cat((first, second[23:])), whole)
    assert torch.equal(in_parts[2], state[2])


@pytest.mark.parametrize("name", CASES)
def test_a_recording_runs_on_the_states_and_inputs_of_its_time(own_native: NativeBackend, name: str) -> None:
    case, state = make(name, own_native, torch.float32)
    inputs, rows, other = case.inputs(3, torch.float32), step_rows((1, 1, 1), [2, 0, 4]), case.inputs(3, torch.float32)
    out, recording = own_native.record(lambda: case.operation(inputs, state, rows))
    assert recording is not None
    for x, new in zip(inputs, other, strict=True):
        x.copy_(new)
    rows.slots.copy_(torch.tensor([1, 2, 3]))
    rows.is_new[1] = True
    expected, expected_state = by_token(case, inputs, state, rows)
    recording.run()
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.double(), expected_state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("gate_first", "activation"), [(True, "silu"), (False, "silu"), (False, "sigmoid")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 8), (5, 3, 37), (4, 2, 128)])
def test_gated_norm(
    ops: Backend, shape: tuple[int, int, int], dtype: torch.dtype, activation: GateActivation, *, gate_first: bool
) -> None:
    x, gate = torch.randn(2, shape[0], shape[1] + 1, shape[2]).to(dtype)[:, :, :-1]
    for weight in (torch.randn(shape[1:]).to(dtype), torch.randn(shape[2]).to(dtype)):
        wide, factor = x.double(), FACTORS[activation](gate.double())
        wide = wide * factor if gate_first else wide
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        expected = expected if gate_first else expected * factor
        out = ops.recurrent.gated_rms_norm(x, gate, weight, 1e-5, gate_first=gate_first, activation=activation)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_multiply_gate(ops: Backend, dtype: torch.dtype) -> None:
    x, gates = torch.randn(2, 5, 60).to(dtype)[:, :, :57]
    for (activation, function), num_gates in product(FACTORS.items(), (57, 3, 1)):
        gate = gates[:, :num_gates] * 4
        out = ops.recurrent.multiply_gate(x, gate, activation)
        assert out.dtype == dtype
        assert out.is_contiguous()
        expected = x.double() * function(gate.double()).repeat_interleave(57 // num_gates, dim=1)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_decays_at_the_end_of_a_chunk_are_as_exact_as_at_its_start(ops: Backend) -> None:
    """No sum of logarithms over the whole chunk shows in what its last tokens keep of one another."""
    log_decay, rows = torch.tensor([-0.37, -1.1, -3.3]), step_rows([64], is_new=True)
    q, k, v = (torch.rand(64, 3, 4) + 0.5 for _ in range(3))  # positive, so that nothing cancels
    out = ops.recurrent.lightning_attention(q, k, v, log_decay, torch.zeros(NUM_SLOTS, 3, 4, 4), rows)
    places = torch.arange(64)
    between = (places[:, None] - places).double()
    weights = (log_decay.double()[:, None, None] * between).exp().tril()
    expected = torch.einsum("ihd,jhd,hij,jhe->ihe", q.double(), k.double(), weights, v.double())
    assert ((out - expected) / expected).abs().max() < 1e-6
