"""Low-rank products of adapters as kernels: right for any mix of adapters, and a token's bits its own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.linear import LowRankWeights
from quire.ops.triton import backend as backend_module
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.kernel_function import KernelFunction
from quire.ops.triton.launch import Kernel
from quire.ops.triton.launcher import _read_arguments, specialize
from quire.ops.triton.specialization import Specialization
from quire.ops.triton.variants import is_listed
from tests.ops.triton.conftest import DEVICE

ADAPTERS = [2, -1, 0, 2, 1, -1, -1]
NUM_ADAPTERS = 3


@pytest.fixture
def ops() -> TritonBackend:
    return TritonBackend()


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backend_module.EagerBackend, "add_low_rank")


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def make(
    in_features: int,
    sizes: tuple[int, ...],
    rank: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    has_factors: bool = False,
) -> LowRankWeights:
    """Three adapters, of which the second has no rank and the third half of it."""
    ranks = torch.tensor([rank, 0, -(-rank // 2)], device=DEVICE)
    a = numbers(NUM_ADAPTERS, len(sizes), rank, in_features, dtype=dtype) / in_features**0.5
    b = numbers(NUM_ADAPTERS, rank, sum(sizes), dtype=dtype) / rank**0.5
    for adapter, used in enumerate(ranks.tolist()):
        a[adapter, :, used:] = 0
        b[adapter, used:] = 0
    shape, factors, shifts = (NUM_ADAPTERS, sum(sizes)), None, None
    if has_factors:
        factors, shifts = torch.rand(shape, device=DEVICE) + 0.5, torch.randn(shape, device=DEVICE)
    return LowRankWeights(a.view(NUM_ADAPTERS, -1, in_features), b, sizes, ranks, factors, shifts)


def formula(x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> Tensor:
    result, rank = out.double(), weights.b.shape[1]
    for token, adapter in enumerate(adapters.tolist()):
        if adapter < 0:
            continue
        start = 0
        for layer, size in enumerate(weights.sizes):
            a = weights.a[adapter, layer * rank : (layer + 1) * rank].double()
            result[token, start : start + size] += weights.b[adapter, :, start : start + size].double().T @ (
                a @ x[token].double()
            )
            start += size
        if weights.factors is not None and weights.shifts is not None:
            result[token] = result[token] * weights.factors[adapter].double() + weights.shifts[adapter].double()
    return result


@pytest.mark.usefixtures("only_kernels")
@pytest.mark.parametrize(
    ("in_features", "sizes", "rank"), [(24, (40,), 4), (520, (72, 8, 136), 16), (1032, (16, 16), 20), (8, (8,), 70)]
)
@pytest.mark.parametrize("has_factors", [False, True], ids=["plain", "factors"])
def test_each_token_gets_the_products_of_its_adapter(
    ops: TritonBackend, in_features: int, sizes: tuple[int, ...], rank: int, has_factors: bool
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        weights = make(in_features, sizes, rank, dtype, has_factors=has_factors)
        adapters = torch.tensor(ADAPTERS, device=DEVICE)
        x, out = numbers(len(adapters), in_features, dtype=dtype), numbers(len(adapters), sum(sizes), dtype=dtype)
        expected, before = formula(x, out, weights, adapters), out.clone()
        got = ops.add_low_rank(x, out, weights, adapters)
        torch.testing.assert_close(got.double(), expected, atol=2e-2, rtol=2**-7)
        assert torch.equal(got[adapters < 0], before[adapters < 0])


@pytest.mark.usefixtures("only_kernels")
def test_a_prompts_tokens_and_rows_that_lie_apart(ops: TritonBackend) -> None:
    weights, adapters = make(24, (24, 8), 4), torch.tensor([0] * 70 + [-1] * 30 + [2] * 40, device=DEVICE)
    x, out = numbers(140, 25)[:, 1:], numbers(140, 40)[:, :32]
    expected = formula(x, out, weights, adapters)
    torch.testing.assert_close(ops.add_low_rank(x, out, weights, adapters).double(), expected, atol=2e-2, rtol=2**-7)


@pytest.mark.usefixtures("only_kernels")
def test_a_token_has_the_same_bits_in_any_batch(ops: TritonBackend) -> None:
    weights, count = make(520, (72,), 20, has_factors=True), 36
    adapters = torch.randint(-1, NUM_ADAPTERS, (count,), device=DEVICE)
    x, out = numbers(count, 520), numbers(count, 72)
    together = ops.add_low_rank(x, out.clone(), weights, adapters)
    for first, end in ((0, 1), (17, 18), (3, 20), (10, 36)):
        part = slice(first, end)
        lone = ops.add_low_rank(x[part].clone(), out[part].clone(), weights, adapters[part])
        assert torch.equal(lone, together[part]), part


@pytest.mark.usefixtures("only_kernels")
def test_invariant_products_of_many_tokens_have_the_bits_of_few() -> None:
    ops, weights = TritonBackend(is_invariant=True), make(520, (8,), 4)
    adapters = torch.tensor([0] * 130, device=DEVICE)
    x, out = numbers(130, 520), numbers(130, 8)
    together = ops.add_low_rank(x, out.clone(), weights, adapters)
    assert torch.equal(ops.add_low_rank(x[120:], out[120:].clone(), weights, adapters[120:]), together[120:])


@pytest.mark.usefixtures("only_kernels")
def test_what_others_have_harms_no_token(ops: TritonBackend) -> None:
    weights, adapters = make(8, (8,), 4), torch.tensor([0, 2, -1], device=DEVICE)
    x, out = numbers(3, 8), numbers(3, 8)
    x[0], x[2] = torch.inf, torch.nan
    weights.b[0] = torch.nan
    expected, before = formula(x[1:2], out[1:2], weights, adapters[1:2]), out.clone()
    got = ops.add_low_rank(x, out, weights, adapters)
    torch.testing.assert_close(got[1:2].double(), expected, atol=2e-2, rtol=2**-7)
    assert torch.equal(got[2], before[2])
    assert got[0].isnan().all()


@pytest.mark.parametrize(
    ("in_features", "sizes", "dtype"),
    [(12, (8,), torch.bfloat16), (8, (8, 1), torch.bfloat16), (8, (8,), torch.float32)],
)
def test_other_products_are_those_of_torch(
    ops: TritonBackend, in_features: int, sizes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernel, "__call__", lambda *_, **__: pytest.fail("a kernel was launched"))
    weights, adapters = make(in_features, sizes, 4, dtype), torch.tensor(ADAPTERS, device=DEVICE)
    x, out = numbers(len(adapters), in_features, dtype=dtype), numbers(len(adapters), sum(sizes), dtype=dtype)
    expected = formula(x, out, weights, adapters)
    torch.testing.assert_close(ops.add_low_rank(x, out, weights, adapters).double(), expected, atol=3e-2, rtol=2**-7)


def test_adapters_ask_for_listed_variants_alone(ops: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[KernelFunction, Specialization]] = []

    def note(self: Kernel, grid: object, *arguments: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
        types, _ = _read_arguments(arguments)
        asked.append((self, specialize(self, types, constants, num_warps, num_stages)))

    monkeypatch.setattr(Kernel, "__call__", note)
    for dtype in (torch.bfloat16, torch.float16):
        for rank in (1, 8, 16, 32, 256):
            for has_factors in (False, True):
                weights = make(64, (32, 8), rank, dtype, has_factors=has_factors)
                for count in (1, 128, 129):
                    adapters = torch.zeros(count, dtype=torch.int64, device=DEVICE)
                    ops.add_low_rank(
                        numbers(count, 64, dtype=dtype), numbers(count, 40, dtype=dtype), weights, adapters
                    )
    assert len(asked) == 2 * 5 * 2 * 3 * 2
    assert [each for each in asked if not is_listed(*each)] == []
