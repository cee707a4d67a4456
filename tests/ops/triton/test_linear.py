"""Linear layers of few tokens: right on odd shapes, and a row's bits the same in any company."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.activations import Activation
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.kernel_function import KernelFunction
from quire.ops.triton.launch import Kernel
from quire.ops.triton.launcher import _read_arguments, specialize
from quire.ops.triton.linear import FUSED, MAX_TOKENS, choose_split, choose_tiles, is_few
from quire.ops.triton.specialization import Specialization
from quire.ops.triton.variants import is_listed
from tests.ops.triton.conftest import DEVICE

SHAPES = [(70, 136), (64, 8), (3, 1032), (66, 552)]
"""(out, in): more and less than a tile, less than a step of inputs, and splits in 4 and 2 with an odd end."""


@pytest.fixture
def ops() -> TritonBackend:
    return TritonBackend()


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products(ops: TritonBackend, shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    weight, bias = numbers(*shape, dtype=dtype), numbers(shape[0], dtype=dtype) if has_bias else None
    packed = ops.pack_linear(weight, bias)
    for num_tokens in (1, 17):
        x = numbers(num_tokens, shape[1], dtype=dtype)
        assert is_few(x, weight)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(ops.linear(x, packed).double(), expected, atol=1e-3, rtol=2**-8)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", FUSED)
def test_gated_layers(ops: TritonBackend, activation: Activation, has_bias: bool) -> None:
    """Gates and ups are rounded as a layer's outputs are; their activation is rounded once.

    What is expected is computed in float64: in float32, `1 + tanh` of the plain formula has lost its digits at -5.
    """
    for size, in_features in ((70, 16), (5, 520)):
        weight, bias = numbers(2 * size, in_features), numbers(2 * size) if has_bias else None
        packed = ops.pack_gated_linear(weight, bias)
        x = numbers(3, in_features)
        rounded = ops.linear(x, ops.pack_linear(weight, bias))
        expected = ops.activate_and_mul(rounded.double(), activation)
        torch.testing.assert_close(ops.gated_linear(x, packed, activation).double(), expected, atol=1e-12, rtol=2**-8)


def test_other_activations_are_operations_of_their_own(ops: TritonBackend) -> None:
    weight, x = numbers(10, 16), numbers(3, 16)
    expected = ops.activate_and_mul(ops.linear(x, ops.pack_linear(weight)), "clamped_swiglu")
    assert torch.equal(ops.gated_linear(x, ops.pack_gated_linear(weight), "clamped_swiglu"), expected)


@pytest.mark.parametrize("shape", [(3, 1032), (70, 16)])
def test_a_row_has_the_same_bits_in_any_company(ops: TritonBackend, shape: tuple[int, int]) -> None:
    packed, x = ops.pack_linear(numbers(*shape)), numbers(MAX_TOKENS, shape[1])
    together = ops.linear(x, packed)
    for first, end in ((0, 1), (77, 78), (0, 2), (100, 116), (3, 20), (0, 64), (60, 125)):
        assert torch.equal(ops.linear(x[first:end], packed), together[first:end]), (first, end)


def test_tiles_hold_all_tokens_and_fit_into_a_card() -> None:
    for out_features, shared_bytes in ((64, 232_448), (1 << 20, 232_448), (1 << 20, 166_912), (1 << 20, 101_376)):
        for num_tokens in range(1, MAX_TOKENS + 1):
            tiles = choose_tiles(num_tokens, out_features, shared_bytes)
            assert num_tokens <= tiles.BLOCK_TOKENS
            assert 2 <= tiles.num_stages <= shared_bytes // tiles.stage_bytes()


def test_splits_give_a_large_card_programs_enough() -> None:
    shapes = {(4096, 1024): 2, (1024, 3072): 8, (6144, 4096): 2, (4096, 12288): 2, (24576, 4096): 1, (64, 8): 1}
    assert {shape: choose_split(*shape) for shape in shapes} == shapes


def test_a_kernel_leaves_its_counts_at_zero(ops: TritonBackend) -> None:
    packed, x = ops.pack_linear(numbers(70, 1032)), numbers(2, 1032)
    first = ops.linear(x, packed)
    for _ in range(3):
        assert torch.equal(ops.linear(x, packed), first)


def test_rows_may_lie_apart_or_be_unaligned(ops: TritonBackend) -> None:
    packed, x = ops.pack_linear(numbers(5, 16)), numbers(4, 25)
    for part in (x[:, :16], x[:, 1:17], numbers(4, 48)[:, 16:32], numbers(16, 4).T):
        assert torch.equal(ops.linear(part, packed), ops.linear(part.contiguous().clone(), packed))


@pytest.mark.parametrize(
    ("num_tokens", "in_features", "dtype"), [(129, 16, torch.bfloat16), (0, 16, torch.bfloat16),
                                             (2, 12, torch.bfloat16), (2, 16, torch.float32)],
)  # fmt: skip
def test_other_products_are_those_of_torch(
    ops: TritonBackend, num_tokens: int, in_features: int, dtype: torch.dtype
) -> None:
    weight, x = numbers(6, in_features, dtype=dtype), numbers(num_tokens, in_features, dtype=dtype)
    assert not is_few(x, weight)
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), torch.nn.functional.linear(x, weight))
    gated = ops.gated_linear(x, ops.pack_gated_linear(weight))
    assert torch.equal(gated, ops.activate_and_mul(torch.nn.functional.linear(x, weight)))


def test_products_ask_for_listed_variants_alone(ops: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[KernelFunction, Specialization]] = []

    def note(self: Kernel, grid: object, *arguments: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
        types, _ = _read_arguments(arguments)
        asked.append((self, specialize(self, types, constants, num_warps, num_stages)))

    monkeypatch.setattr(Kernel, "__call__", note)
    for dtype in (torch.bfloat16, torch.float16):
        for weight in (numbers(6, 8, dtype=dtype), numbers(6, 1032, dtype=dtype), numbers(20000, 8, dtype=dtype)):
            for num_tokens in (1, 2, 16, 31, 33, 127):
                x = numbers(num_tokens, weight.shape[1], dtype=dtype)
                for bias in (None, numbers(len(weight), dtype=dtype)):
                    ops.linear(x, ops.pack_linear(weight, bias))
                    for activation in FUSED:
                        ops.gated_linear(x, ops.pack_gated_linear(weight, bias), activation)
    assert len(asked) == 2 * 3 * 6 * 2 * 3
    assert [each for each in asked if not is_listed(*each)] == []


@pytest.mark.parametrize("shape", [(70, 1032), (136, 16)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_invariant_products_of_many_tokens_have_the_bits_of_few(
    shape: tuple[int, int], activation: Activation | None
) -> None:
    """With a split, and without one.

    The sum of a step of 128 inputs is exact, whatever the interpreter's order; sums of steps are rounded.
    """
    ops = TritonBackend(is_invariant=True)
    weight, bias = numbers(*shape).round(), numbers(shape[0])
    scales = 2.0 ** (11 * (torch.arange(shape[1], device=DEVICE) // 128) % 40 - 20)
    x = numbers(MAX_TOKENS + 37, shape[1]).round() * scales.bfloat16()

    def product(part: Tensor) -> Tensor:
        if activation is None:
            return ops.linear(part, ops.pack_linear(weight, bias))
        return ops.gated_linear(part, ops.pack_gated_linear(weight, bias), activation)

    together = product(x)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    if activation is None:
        torch.testing.assert_close(together.double(), expected, atol=0.25, rtol=2**-8)
    for first, end in ((0, 1), (100, 164), (128, 165), (20, 148)):
        assert torch.equal(product(x[first:end]), together[first:end]), (first, end)


def test_products_are_torchs_where_nobody_asks_for_invariant_ones(ops: TritonBackend) -> None:
    weight, x = numbers(6, 16), numbers(MAX_TOKENS + 1, 16)
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), torch.nn.functional.linear(x, weight))


def test_invariant_products_ask_for_listed_variants_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[KernelFunction, Specialization]] = []

    def note(self: Kernel, grid: object, *arguments: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
        types, _ = _read_arguments(arguments)
        asked.append((self, specialize(self, types, constants, num_warps, num_stages)))

    monkeypatch.setattr(Kernel, "__call__", note)
    ops = TritonBackend(is_invariant=True)
    for dtype in (torch.bfloat16, torch.float16):
        weight, x = numbers(6, 8, dtype=dtype), numbers(200, 8, dtype=dtype)
        ops.linear(x, ops.pack_linear(weight))
        for activation in FUSED:
            ops.gated_linear(x, ops.pack_gated_linear(weight), activation)
    assert {each.name for each, _ in asked} == {"multiply_many"}
    assert len(asked) == 2 * 3
    assert [each for each in asked if not is_listed(*each)] == []
