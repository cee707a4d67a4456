"""Low-rank products of adapters against their formula, at odd sizes too."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops.activations import Activation
from quire.ops.backend import Backend
from quire.ops.cpu.native import NativeBackend
from quire.ops.eager.low_rank import add_low_rank
from quire.ops.eager.quantized import PART
from quire.ops.linear import LowRankWeights
from tests.ops.test_elementwise import DTYPES, assert_near

torch.set_num_threads(1)

NUM_ADAPTERS, RANK = 3, 4


def weights_of(in_features: int, sizes: tuple[int, ...], dtype: torch.dtype) -> LowRankWeights:
    a = torch.randn(NUM_ADAPTERS, len(sizes) * RANK, in_features) / in_features**0.5
    return LowRankWeights(a.to(dtype), (torch.randn(NUM_ADAPTERS, RANK, sum(sizes)) / RANK).to(dtype), sizes)


def formula(x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> Tensor:
    """Multiplies with `b @ a` of each layer and each token's adapter."""
    result = out.double()
    for token, adapter in enumerate(adapters.tolist()):
        start = 0
        for layer, size in enumerate(weights.sizes):
            if adapter >= 0:
                a = weights.a[adapter, layer * RANK : (layer + 1) * RANK].double()
                b = weights.b[adapter, :, start : start + size].double()
                result[token, start : start + size] += b.T @ a @ x[token].double()
            start += size
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1,), (40,), (33, 7, 16)], ids=str)
@pytest.mark.parametrize("in_features", [1, 24, 70])
def test_each_token_gets_the_products_of_its_adapter(
    ops: Backend, in_features: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    weights = weights_of(in_features, sizes, dtype)
    adapters = torch.tensor([2, -1, 0, 2, 1, -1, -1])
    x = torch.randn(len(adapters), 2 * in_features).to(dtype)[:, :in_features]
    out = torch.randn(len(adapters), sum(sizes)).to(dtype)
    expected = formula(x, out, weights, adapters)
    before = out.clone()
    got = ops.add_low_rank(x, out, weights, adapters)
    assert_near(got, expected, dtype)
    assert torch.equal(got[adapters < 0], before[adapters < 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_scaled_and_shifted_and_unused_ranks_are_not_read(ops: Backend, dtype: torch.dtype) -> None:
    a, b, sizes, *_ = weights_of(24, (33, 7), dtype)
    ranks = torch.tensor([4, 0, 2])
    a, b = a.view(NUM_ADAPTERS, 2, RANK, 24), b.clone()
    for adapter, rank in enumerate(ranks.tolist()):
        a[adapter, :, rank:] = 0
        b[adapter, rank:] = 0
    factors, shifts = torch.rand(NUM_ADAPTERS, 40) + 0.5, torch.randn(NUM_ADAPTERS, 40)
    weights = LowRankWeights(a.view(NUM_ADAPTERS, -1, 24), b, sizes, ranks, factors, shifts)
    adapters = torch.tensor([2, -1, 0, 2, 1, -1, 2, 2, 2])
    x, out = torch.randn(len(adapters), 24).to(dtype), torch.randn(len(adapters), 40).to(dtype)
    expected, has = formula(x, out, weights, adapters), adapters >= 0
    expected[has] = expected[has] * factors[adapters[has]].double() + shifts[adapters[has]].double()
    before = out.clone()
    got = ops.add_low_rank(x, out, weights, adapters)
    assert_near(got, expected, dtype)
    assert torch.equal(got[~has], before[~has])


class _Sizes(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(each.numel() for each in (result,) if isinstance(each, Tensor))])
        return result


def test_a_long_prompt_takes_no_memory_for_the_products_with_all_adapters() -> None:
    """In plain torch, where each token is multiplied with the weights of all; experts of adapters are thousands."""
    numbers, tokens = 2048, 1500
    a, b = torch.randn(numbers, 2 * RANK, 3), torch.randn(numbers, RANK, 10)
    weights, adapters = LowRankWeights(a, b, (5, 5)), torch.arange(tokens) * 37 % numbers
    x = torch.randn(tokens, 3)
    with _Sizes() as sizes:
        got = add_low_rank(x, torch.zeros(tokens, 10), weights, adapters)
    assert sizes.largest <= PART < numbers * 2 * RANK * tokens
    inner = torch.einsum("ti,tri->tr", x, a[adapters]).view(tokens, 2, RANK)
    wanted = torch.einsum("tpr,trpo->tpo", inner, b[adapters].view(tokens, RANK, 2, 5)).flatten(1)
    torch.testing.assert_close(got, wanted)


def test_a_token_of_infinities_harms_no_other(ops: Backend) -> None:
    weights, adapters = weights_of(8, (8,), torch.float32), torch.tensor([0, 1, -1])
    x = torch.tensor([[torch.inf] * 8, [1.0] * 8, [torch.nan] * 8])
    out = ops.add_low_rank(x, torch.zeros(3, 8), weights, adapters)
    assert_near(out[1:2], formula(x[1:2], torch.zeros(1, 8), weights, adapters[1:2]), torch.float32)
    assert not out[2].any()


def test_a_recording_reads_the_current_adapters_and_weights(own_native: NativeBackend) -> None:
    weights, adapters = weights_of(24, (16, 16), torch.float32), torch.tensor([0, -1, 2])
    x, base = torch.randn(3, 24), torch.randn(3, 32)

    def step() -> Tensor:
        return own_native.add_low_rank(x, own_native.join([base]), weights, adapters)

    _, recording = own_native.record(step)
    assert recording is not None
    adapters.copy_(torch.tensor([1, 2, -1]))
    weights.b[2].zero_()
    result, _ = own_native.record(step)
    expected = result.clone()
    result.zero_()
    recording.run()
    assert torch.equal(result, expected)
    assert_near(result, formula(x, base, weights, adapters), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_batch(native: NativeBackend, dtype: torch.dtype) -> None:
    weights, adapters = weights_of(70, (33,), dtype), torch.tensor([0, 1, 2, -1, 0, 0, 1, 0, 0])
    x, out = torch.randn(9, 70).to(dtype), torch.randn(9, 33).to(dtype)
    together = native.add_low_rank(x, out.clone(), weights, adapters)
    for token in range(9):
        own = slice(token, token + 1)
        assert torch.equal(native.add_low_rank(x[own], out[own].clone(), weights, adapters[own]), together[own])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [2, 3, 40])
def test_threads_change_no_bit(native: NativeBackend, num_tokens: int, dtype: torch.dtype) -> None:
    """Few tokens are divided over threads, many are not; ranks are odd, and chunks of outputs cross layers' ends."""
    ranks, sizes, most = torch.tensor([11, 12, 5]), (300, 333), 12
    a = torch.randn(NUM_ADAPTERS, len(sizes), most, 500) / 22
    b = torch.randn(NUM_ADAPTERS, most, sum(sizes)) / most
    for adapter, rank in enumerate(ranks.tolist()):
        a[adapter, :, rank:] = 0
        b[adapter, rank:] = 0
    weights = LowRankWeights(a.flatten(1, 2).to(dtype), b.to(dtype), sizes, ranks)
    adapters = torch.arange(num_tokens) % NUM_ADAPTERS
    x, out = torch.randn(num_tokens, 500).to(dtype), torch.randn(num_tokens, sum(sizes)).to(dtype)
    alone = native.add_low_rank(x, out.clone(), weights, adapters)
    torch.set_num_threads(3)
    try:
        together = native.add_low_rank(x, out.clone(), weights, adapters)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(together, alone)
    first = slice(0, 1)
    assert torch.equal(native.add_low_rank(x[first], out[first].clone(), weights, adapters[first]), alone[first])
    expected = out.double()
    for token, adapter in enumerate(adapters.tolist()):
        for layer, part in enumerate((slice(0, sizes[0]), slice(sizes[0], None))):
            inner = weights.a.view(NUM_ADAPTERS, 2, most, 500)[adapter, layer].double() @ x[token].double()
            expected[token, part] += inner @ weights.b[adapter, :, part].double()
    assert_near(alone, expected, dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 300])
def test_gates_are_activated_as_after_the_sum(
    ops: Backend, size: int, dtype: torch.dtype, has_factors: bool, activation: Activation
) -> None:
    """To the bit, so that tokens without adapters have what they have in a step where nobody has one."""
    weights, adapters = weights_of(24, (size, size), dtype), torch.tensor([2, -1, 0, -1, 2, 2, 1])
    if has_factors:
        factors, shifts = torch.rand(NUM_ADAPTERS, 2 * size) + 0.5, torch.randn(NUM_ADAPTERS, 2 * size)
        weights = weights._replace(factors=factors, shifts=shifts)
    x, out = torch.randn(7, 24).to(dtype), torch.randn(7, 2 * size).to(dtype)
    expected = ops.activate_and_mul(ops.add_low_rank(x, out.clone(), weights, adapters), activation)
    alone = ops.activate_and_mul(out.clone(), activation)
    got = ops.gated_low_rank(x, out.clone(), weights, adapters, activation)
    assert torch.equal(got, expected)
    assert torch.equal(got[adapters < 0], alone[adapters < 0])
