"""The kernels of experts, against plain torch."""

import pytest
import torch
from torch import Tensor

from quire.ops.activations import Activation
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.experts import ExpertCall, ExpertWeights, LowRankExperts
from quire.ops.linear import LowRankWeights
from quire.ops.quantized import QuantizedWeight, dequantize
from quire.ops.triton import expert_blocks, experts
from quire.ops.triton.backend import TritonBackend
from tests.ops.test_experts import choose, make_experts
from tests.ops.triton.conftest import DEVICE

TABLE = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
KERNELS, PLAIN = TritonBackend(), EagerBackend(PlainLinear())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def move(weights: ExpertWeights, dtype: torch.dtype | None = None) -> ExpertWeights:
    """Moves an expert to the device, and with `dtype`, dequantizes it."""

    def moved(part: Tensor | QuantizedWeight | None) -> Tensor | QuantizedWeight | None:
        if isinstance(part, QuantizedWeight):
            if dtype is not None:
                return dequantize(part, dtype).to(DEVICE)
            return part._replace(**{k: v.to(DEVICE) for k, v in part._asdict().items() if isinstance(v, Tensor)})
        return None if part is None else part.to(DEVICE, dtype)

    return ExpertWeights(*map(moved, weights))  # type: ignore[arg-type]


def check(
    some: list[ExpertWeights],
    num_tokens: int,
    top_k: int,
    activation: Activation = "silu",
    *,
    dtype: torch.dtype = torch.bfloat16,
    weighs_inputs: bool = False,
) -> None:
    """Compares with plain torch in float32, and a token's result with that of the token alone."""
    ids, weights = choose(num_tokens, len(some), top_k)
    ids[0, 0] = -1  # an expert of another rank
    ids, weights = ids.to(DEVICE), weights.to(DEVICE)
    x = torch.randn(num_tokens, some[0].down.shape[0]).to(DEVICE, dtype)
    packed = KERNELS.pack_experts(map(move, some), len(some))
    assert experts.covers(x, packed)
    got = KERNELS.experts(packed, ExpertCall(x, ids, weights, activation, weighs_inputs=weighs_inputs))
    assert got.dtype == dtype
    full = PLAIN.pack_experts([move(each, torch.float32) for each in some], len(some))
    expected = PLAIN.experts(full, ExpertCall(x.float(), ids, weights, activation, weighs_inputs=weighs_inputs))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(got.float(), expected, atol=tolerance * expected.abs().max().item(), rtol=0)
    last = slice(num_tokens - 1, num_tokens)
    alone = KERNELS.experts(
        packed, ExpertCall(x[last], ids[last], weights[last], activation, weighs_inputs=weighs_inputs)
    )
    assert torch.equal(alone, got[last])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 30])
@pytest.mark.parametrize(("hidden", "size"), [(64, 64), (37, 21)])
def test_experts_of_whole_numbers(hidden: int, size: int, num_tokens: int, dtype: torch.dtype) -> None:
    check(make_experts(5, hidden, size, dtype, has_bias=size == 21), num_tokens, 3, dtype=dtype)


@pytest.mark.parametrize("num_tokens", [150, 300])
def test_blocks_of_many_tokens(num_tokens: int) -> None:
    check(make_experts(3, 24, 16, torch.bfloat16), num_tokens, 2)


def test_a_popular_expert_fills_several_blocks() -> None:
    some = make_experts(8, 64, 24, torch.bfloat16)
    packed = KERNELS.pack_experts(map(move, some), 8)
    x, ids = torch.randn(37, 64).to(DEVICE, torch.bfloat16), torch.full((37, 1), 6, device=DEVICE)
    weights = torch.ones(37, 1, device=DEVICE)
    got = KERNELS.experts(packed, ExpertCall(x, ids, weights))
    torch.testing.assert_close(got, PLAIN.experts(packed, ExpertCall(x, ids, weights)), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "quick_gelu", "relu", "clamped_swiglu", "clamped_silu"])
def test_gated_activations(activation: Activation) -> None:
    check(make_experts(3, 16, 24, torch.float16, has_bias=True), 3, 2, activation, dtype=torch.float16)


@pytest.mark.parametrize("activation", ["relu2", "silu"])
@pytest.mark.parametrize("weighs_inputs", [False, True])
def test_experts_without_gates(activation: Activation, weighs_inputs: bool) -> None:
    some = make_experts(5, 37, 24, torch.bfloat16, has_bias=True, is_gated=False)
    check(some, 9, 2, activation, weighs_inputs=weighs_inputs)


def quantized(kind: str, out: int, inputs: int, group: int, *, has_offsets: bool, has_order: bool) -> QuantizedWeight:
    scales = (torch.rand(out, inputs // group) + 0.5) / 8 / inputs**0.5
    offsets = torch.randn(out, inputs // group) / inputs**0.5 if has_offsets else None
    order = torch.randperm(inputs) if has_order else None
    if kind == "int4":
        codes = torch.randint(0, 256, (out, inputs // 2), dtype=torch.uint8)
        return QuantizedWeight(codes, scales, TABLE, offsets, order)
    if kind == "int8":
        return QuantizedWeight(
            torch.randint(-127, 128, (out, inputs), dtype=torch.int8), scales / 32, None, offsets, order
        )
    return QuantizedWeight((torch.randn(out, inputs) * 4).to(getattr(torch, kind)), scales, None, offsets, order)


@pytest.mark.parametrize("kind", ["int4", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("hidden", "size", "groups", "is_odd"), [(128, 64, (128, 16), False), (40, 24, (20, 8), True)])
def test_quantized_experts(kind: str, hidden: int, size: int, groups: tuple[int, int], is_odd: bool) -> None:
    some = [
        ExpertWeights(
            quantized(kind, 2 * size, hidden, groups[0], has_offsets=is_odd, has_order=is_odd),
            quantized(kind, hidden, size, groups[1], has_offsets=not is_odd, has_order=is_odd),
            torch.randn(2 * size) if is_odd else None,
        )
        for _ in range(4)
    ]
    check(some, 3, 2)


def test_ups_of_another_form_than_the_gates() -> None:
    some = [
        ExpertWeights(
            quantized("int4", 24, 64, 32, has_offsets=False, has_order=False),
            quantized("int8", 64, 24, 24, has_offsets=False, has_order=False),
            torch.randn(48),
            torch.randn(64),
            quantized("int8", 24, 64, 16, has_offsets=True, has_order=False),
        )
        for _ in range(4)
    ]
    check(some, 3, 2)


@pytest.mark.parametrize("is_at_once", [True, False])
def test_every_choice_is_in_one_block_of_its_expert(is_at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_at_once:
        monkeypatch.setattr(expert_blocks, "_AT_ONCE", 0)
    for num_tokens, top_k, num_experts, size in ((1, 1, 1, 16), (40, 3, 11, 16), (700, 3, 20, 32)):
        ids = choose(num_tokens, num_experts, top_k)[0].to(DEVICE)
        ids[ids == 2] = -1
        blocks = expert_blocks.sort_by_expert(ids, num_experts, size)
        assert blocks.members is not None
        found: list[int] = []
        for expert, members in zip(blocks.experts.tolist(), blocks.members.tolist(), strict=True):
            held = [each for each in members if each >= 0]
            assert (expert == -1) == (not held)
            assert {ids.flatten()[each].item() for each in held} <= {expert}
            found += held
        assert sorted(found) == (ids.flatten() >= 0).nonzero().flatten().tolist()
        for expert in range(num_experts):
            assert (blocks.experts == expert).sum() == -(-(ids == expert).sum().item() // size)


def test_no_token_has_no_result() -> None:
    packed = KERNELS.pack_experts(map(move, make_experts(2, 16, 16, torch.bfloat16)), 2)
    none = torch.empty(0, 16, dtype=torch.bfloat16, device=DEVICE)
    ids, weights = choose(1, 2, 1)
    got = KERNELS.experts(packed, ExpertCall(none, ids[:0].to(DEVICE), weights[:0].to(DEVICE)))
    assert got.shape == (0, 16)


def adapters_of(num_experts: int, num_tokens: int, hidden: int, size: int, dtype: torch.dtype) -> LowRankExperts:
    """Two adapters of rank 4; some tokens have none."""

    def low_rank(inputs: int, sizes: tuple[int, ...]) -> LowRankWeights:
        a = torch.randn(2 * num_experts, len(sizes) * 4, inputs) / inputs**0.5
        b = torch.randn(2 * num_experts, 4, sum(sizes)) / 2
        return LowRankWeights(a.to(DEVICE, dtype), b.to(DEVICE, dtype), sizes)

    numbers = (torch.arange(num_tokens) % 3 - 1).to(DEVICE)
    return LowRankExperts(low_rank(hidden, (size, size)), low_rank(size, (hidden,)), numbers)


@pytest.mark.parametrize("weighs_inputs", [False, True])
@pytest.mark.parametrize(("hidden", "size"), [(64, 24), (40, 21)])
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_adapters_of_experts(
    num_tokens: int, hidden: int, size: int, weighs_inputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with padding, too, whose low-rank products plain torch computes."""
    some, dtype = make_experts(6, hidden, size, torch.bfloat16), torch.bfloat16
    packed = KERNELS.pack_experts(map(move, some), len(some))
    ids, weights = (each.to(DEVICE) for each in choose(num_tokens, len(some), 2))
    ids[0, 0] = -1
    x, added = (
        torch.randn(num_tokens, hidden).to(DEVICE, dtype),
        adapters_of(len(some), num_tokens, hidden, size, dtype),
    )
    call = ExpertCall(x, ids, weights, "silu", weighs_inputs, added)
    wide = LowRankExperts(*(each._replace(a=each.a.float(), b=each.b.float()) for each in added[:2]), added.adapters)
    full = PLAIN.pack_experts([move(each, torch.float32) for each in some], len(some))
    expected = PLAIN.experts(full, call._replace(x=x.float(), low_rank=wide))
    monkeypatch.delattr(EagerBackend, "experts")
    got = KERNELS.experts(packed, call)
    torch.testing.assert_close(got.float(), expected, atol=2e-2 * expected.abs().max().item(), rtol=0)
