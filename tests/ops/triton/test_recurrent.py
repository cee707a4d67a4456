"""Recurrent layers as kernels, in decode steps and prompts, against the formulas in float64."""

import pytest
import torch

from quire.ops.eager.recurrent import EagerRecurrent
from quire.ops.recurrent import GateActivation, StateRows
from quire.ops.triton.backend import TritonBackend
from tests.ops.test_recurrent import CASES, Case, by_token, make, step_rows
from tests.ops.triton.conftest import DEVICE

KERNELS = TritonBackend()
DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
IN_KERNELS = [name for name in CASES if not name.startswith("matrix memory")]
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
    for name in ("causal_conv1d", "selective_scan", "ssd", "lightning_attention", "gated_delta_rule", "wkv", "rg_lru"):
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
