"""Recurrent layers as kernels, in decode steps and prompts, against the formulas in float64."""

import pytest
import torch

from quire.ops.eager.recurrent import EagerRecurrent
from quire.ops.recurrent import GateActivation, StateRows
from quire.ops.triton import decayed_products
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.launch import Kernel
from tests.ops.test_recurrent import CASES, Case, by_token, make, step_rows
from tests.ops.triton.conftest import DEVICE

KERNELS = TritonBackend()
DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
IN_KERNELS = list(CASES)
IN_CHUNKS = [
    name for name in CASES if name.startswith(("mamba 2", "lightning", "delta rule")) and "channel" not in name
]
MIXED = (1, 3, 5, 2)


def decode_rows(slots: list[int], new: tuple[int, ...] = ()) -> StateRows:
    is_new = torch.tensor([row in new for row in range(len(slots))], device=DEVICE)
    return StateRows(torch.tensor(slots, device=DEVICE), torch.arange(len(slots) + 1), is_new)


def make_case(name: str, dtype: torch.dtype, num_rows: int) -> tuple[Case, list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        case, state = make(name, KERNELS, dtype)
        return case, case.inputs(num_rows, dtype), state


@pytest.fixture(autouse=True)
def _only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("causal_conv1d", "selective_scan", "ssd", "lightning_attention", "gated_delta_rule", "wkv", "rg_lru"),
        "mlstm",
    ):
        monkeypatch.delattr(EagerRecurrent, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IN_KERNELS)
def test_outputs_and_states_are_those_of_the_formula(name: str, dtype: torch.dtype) -> None:
    case, inputs, state = make_case(name, dtype, 3)
    expected, expected_state = by_token(case, inputs, state, decode_rows([4, 0, 2]))
    out = case.operation(inputs, state, decode_rows([4, 0, 2]))
    assert out.dtype == dtype
    scale = expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype] * scale, rtol=TOLERANCE[dtype])
    torch.testing.assert_close(state.double(), expected_state, atol=1e-5 * scale, rtol=1e-5)


@pytest.mark.parametrize("name", IN_KERNELS)
def test_rows_are_new_or_padding_or_alone(name: str) -> None:
    case, inputs, state = make_case(name, torch.float32, 3)
    state[1] = torch.nan
    before, zeros = state.clone(), state.clone()
    zeros[1] = 0
    out = case.operation(inputs, state, decode_rows([3, 1, -1], new=(1,)))
    expected, expected_state = by_token(case, [x[:2] for x in inputs], zeros, decode_rows([3, 1]))
    torch.testing.assert_close(out[:2].double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.double(), expected_state, atol=1e-4, rtol=1e-4)
    assert torch.equal(state[[0, 2, 4]], before[[0, 2, 4]])
    assert torch.equal(case.operation([x[:1] for x in inputs], before, decode_rows([3])), out[:1])
    assert torch.equal(before[3], state[3])


@pytest.mark.parametrize("name", IN_KERNELS)
def test_prompts_beside_decode_steps(name: str) -> None:
    dtype = torch.float32
    case, inputs, state = make_case(name, dtype, sum(MIXED))
    rows = step_rows(MIXED, [4, 0, 2, 1])._replace(is_new=torch.tensor([False, True, True, False]))
    rows = rows._replace(slots=rows.slots.to(DEVICE), is_new=rows.is_new.to(DEVICE))
    zeros, lone = state.clone(), state.clone()
    zeros[[0, 2]] = 0
    expected, expected_state = by_token(case, inputs, zeros, rows)
    state[[0, 2]] = lone[[0, 2]] = torch.nan
    out = case.operation(inputs, state, rows)
    assert out.dtype == dtype
    scale = expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype] * scale, rtol=TOLERANCE[dtype])
    torch.testing.assert_close(state.double(), expected_state, atol=1e-5 * scale, rtol=1e-5)
    there = rows._replace(starts_there=rows.starts.to(DEVICE))
    assert torch.equal(case.operation(inputs, lone, there), out)


LONG = (1, 37, 16, 17)
"""Rows of few tokens, and of chunks, of which the last are not whole."""
SHORT_CHUNK = 16
"""Tokens of a chunk in the interpreter, which takes long for 64."""


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(decayed_products, "CHUNK", SHORT_CHUNK)


def long_case(name: str, dtype: torch.dtype) -> tuple[Case, list[torch.Tensor], torch.Tensor, StateRows]:
    case, inputs, state = make_case(name, dtype, sum(LONG))
    rows = step_rows(LONG, [4, 0, 2, 1])._replace(is_new=torch.tensor([False, True, True, False]))
    state[[0, 2]] = torch.nan
    return case, inputs, state, on_device(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *([torch.float32] if DEVICE == "cpu" else [])])
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_chunks_of_prompts_are_those_of_the_formula(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, which only the interpreter computes exactly, errors would show that rounding hides."""
    monkeypatch.setattr(decayed_products, "CHUNKED_TYPES", DTYPES)
    case, inputs, state, rows = long_case(name, dtype)
    zeros = state.nan_to_num(0.0)
    expected, expected_state = by_token(case, inputs, zeros, rows)
    out = case.operation(inputs, state, rows)
    scale, exact = expected.abs().max().item(), TOLERANCE[dtype] if dtype == torch.bfloat16 else 5e-5
    torch.testing.assert_close(out.double(), expected, atol=exact * scale, rtol=exact)
    bound = 2e-5 if dtype == torch.float32 else 5e-3  # additions to states are rounded to 8 bits
    most = expected_state.abs().max().item()
    torch.testing.assert_close(state.double(), expected_state, atol=bound * most, rtol=bound)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_only_rows_of_few_tokens_are_not_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs, state, rows = long_case(name, torch.bfloat16)
    asked: list[str] = []
    monkeypatch.setattr(Kernel, "__call__", lambda self, *_, **__: asked.append(self.name))
    case.operation(inputs, state, rows)
    case.operation([x[:16] for x in inputs], state, on_device(step_rows([16], [2])))
    in_chunks = ["solve_chunks", "pass_delta_chunks"] if name.startswith("delta") else ["pass_chunks"]
    assert asked == [*in_chunks, "update_outer_products", "update_outer_products"]


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_equal_keys_do_not_make_chunks_worse(name: str) -> None:
    """Nothing cancels, so that errors of states add up."""
    case, inputs, state, rows = long_case(name, torch.bfloat16)
    shared = 2 if name.startswith("mamba") else 1
    inputs[shared] = inputs[shared][:1].expand_as(inputs[shared]).contiguous()
    expected, _ = by_token(case, inputs, state.nan_to_num(0.0), rows)
    out = case.operation(inputs, state, rows)
    scale = expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, atol=2e-2 * scale, rtol=2e-2)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_a_row_of_few_tokens_has_its_bits_beside_long_prompts(name: str) -> None:
    case, inputs, state, rows = long_case(name, torch.bfloat16)
    lone = state.clone()
    out = case.operation(inputs, state, rows)
    alone = [x[38:54] for x in inputs]
    own = on_device(step_rows([16], [2], is_new=True))
    assert torch.equal(case.operation(alone, lone, own), out[38:54])
    assert torch.equal(lone[2], state[2])


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_an_invariant_backend_has_no_chunks(name: str) -> None:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        case, state = make(name, TritonBackend(is_invariant=True), torch.bfloat16)
        inputs = case.inputs(40, torch.bfloat16)
    in_parts = state.clone()
    out = case.operation(inputs, state, on_device(step_rows([40], [2])))
    parts = [
        case.operation([x[begin:end] for x in inputs], in_parts, on_device(step_rows([end - begin], [2])))
        for begin, end in ((0, 29), (29, 40))
    ]
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(in_parts, state)


def on_device(rows: StateRows) -> StateRows:
    return rows._replace(slots=rows.slots.to(DEVICE), is_new=rows.is_new.to(DEVICE))


@pytest.mark.parametrize("name", IN_KERNELS)
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(name: str) -> None:
    case, inputs, state = make_case(name, torch.float32, 4)
    lone = state.clone()
    out = case.operation(inputs, state, step_rows([4], [2])._replace(slots=torch.tensor([2], device=DEVICE)))
    outs = [case.operation([x[i : i + 1] for x in inputs], lone, decode_rows([2])) for i in range(4)]
    assert torch.equal(torch.cat(outs), out)
    assert torch.equal(lone, state)


@pytest.mark.parametrize(("gate_first", "activation"), [(True, "silu"), (False, "sigmoid"), (False, "softplus")])
@pytest.mark.parametrize("shape", [(3, 3, 37), (2, 2, 128)])
def test_gated_norm(shape: tuple[int, int, int], activation: GateActivation, *, gate_first: bool) -> None:
    x, gate = torch.randn(2, shape[0], shape[1] + 1, shape[2]).to(DEVICE, torch.bfloat16)[:, :, :-1]
    for weight in (torch.randn(shape[1:]).to(x), torch.randn(shape[2]).to(x)):
        options = {"gate_first": gate_first, "activation": activation}
        out = KERNELS.recurrent.gated_rms_norm(x, gate, weight, 1e-5, **options)  # type: ignore[arg-type]
        expected = EagerRecurrent().gated_rms_norm(x.float(), gate.float(), weight.float(), 1e-5, **options)  # type: ignore[arg-type]
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)
