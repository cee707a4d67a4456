"""The bfloat16 linear kernel against the plain product: odd shapes, views, threads, and the same bits in any batch."""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor

from quire.ops.activations import Activation, PlainActivation
from quire.ops.cpu.native import NativeBackend
from quire.ops.cpu.panels import PanelWeight
from tests.ops.levels import TESTED, Level, in_turns

# Outputs that are no multiple of a panel (32), inputs that are odd or more than the kernel takes at once (3072).
SHAPES = [(1, 1), (7, 33), (32, 2), (130, 64), (257, 511), (64, 3073), (40, 6200)]
NUM_TOKENS = [0, 1, 2, 14, 15, 33, 127]
ACTIVATIONS: list[Activation] = [*get_args(PlainActivation), "clamped_swiglu"]


@pytest.fixture(
    scope="session", params=in_turns(level for level in TESTED if level.has_panels), ids=lambda level: level.name
)
def native(request: pytest.FixtureRequest) -> NativeBackend:
    level: Level = request.param
    backend = level.backend()
    assert isinstance(backend.pack_linear(torch.ones(1, 1, dtype=torch.bfloat16)), PanelWeight)
    return backend


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, which share even the smallest operation."""
    monkeypatch.setattr("quire.ops.cpu.native._WORTH_TEAM_SECONDS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def layer(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn(out_features, in_features) / in_features**0.5
    return weight.bfloat16(), torch.randn(out_features).bfloat16()


def assert_near(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_odd_shapes(native: NativeBackend, threads: None, shape: tuple[int, int], has_bias: bool) -> None:
    weight, bias = layer(*shape)
    packed = native.pack_linear(weight, bias if has_bias else None)
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, shape[1]).bfloat16()
        assert_near(native.linear(x, packed), x, weight, bias if has_bias else None)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(native: NativeBackend, threads: None, shape: tuple[int, int]) -> None:
    packed = native.pack_linear(*layer(*shape))
    x = torch.randn(1100, shape[1]).bfloat16()  # more than the kernel takes at once
    together = native.linear(x, packed)
    for num_tokens in (*NUM_TOKENS, 640):
        for first in (0, 3, 1100 - num_tokens):
            part = slice(first, first + num_tokens)
            assert torch.equal(native.linear(x[part], packed), together[part])


@pytest.mark.parametrize("shape", [(2, 1), (30, 33), (32, 64), (34, 3073), (258, 511)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_layer_has_the_bits_of_separate_steps(
    native: NativeBackend, threads: None, shape: tuple[int, int], has_bias: bool
) -> None:
    weight, bias = layer(*shape)
    gated = native.pack_gated_linear(weight, bias if has_bias else None)
    assert isinstance(gated, PanelWeight)
    plain = native.pack_linear(weight, bias if has_bias else None)
    for num_tokens in (*NUM_TOKENS, 1100):
        x = torch.randn(num_tokens, shape[1]).bfloat16() * 4
        for activation in ACTIVATIONS:
            expected = native.activate_and_mul(native.linear(x, plain), activation)
            assert torch.equal(native.gated_linear(x, gated, activation), expected)


def test_threads_do_not_change_a_bit(native: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = native.pack_linear(*layer(1000, 96))
    x = torch.randn(50, 96).bfloat16()
    seen = []
    before = torch.get_num_threads()
    monkeypatch.setattr("quire.ops.cpu.native._WORTH_TEAM_SECONDS", 0)
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        seen.append(native.linear(x, packed))
    torch.set_num_threads(before)
    assert all(torch.equal(other, seen[0]) for other in seen[1:])


def test_views(native: NativeBackend, threads: None) -> None:
    """Rows or columns that are not contiguous, and a weight and a bias that are parts of larger tensors."""
    weights, biases = layer(90, 130)
    weight, bias = weights[20:60, 5:72], biases[::2][:40]
    packed = native.pack_linear(weight, bias)
    wide = torch.randn(40, 200).bfloat16()
    tall = torch.randn(67, 40).bfloat16()
    for x in (wide[:, 3:70], wide[::3, 100:167], wide[7:8, 3:70], tall.T, wide[:, ::2][:, :67]):
        assert_near(native.linear(x, packed), x, weight, bias)


def test_the_shards_of_a_layer_make_the_layer(native: NativeBackend, threads: None) -> None:
    weight, bias = layer(96, 256)
    x = torch.randn(9, 256).bfloat16()
    whole = native.linear(x, native.pack_linear(weight, bias))
    columns = [native.linear(x, native.pack_linear(weight[part], bias[part])) for part in (slice(48), slice(48, 96))]
    assert torch.equal(torch.cat(columns, 1), whole)
    rows = [
        native.linear(x[:, part], native.pack_linear(weight[:, part], rank_bias)).float()
        for part, rank_bias in ((slice(128), bias), (slice(128, 256), None))
    ]
    torch.testing.assert_close(rows[0] + rows[1], whole.float(), atol=3e-2, rtol=2e-2)


def test_a_broken_row_stays_alone(native: NativeBackend, threads: None) -> None:
    packed = native.pack_linear(*layer(33, 65))
    x = torch.randn(20, 65).bfloat16()
    clean = native.linear(x, packed)
    x[3], x[11] = torch.nan, torch.inf
    got = native.linear(x, packed)
    assert got[3].isnan().all()
    assert not got[11].isfinite().any()
    others = [row for row in range(20) if row not in (3, 11)]
    assert torch.equal(got[others], clean[others])


def test_memory_past_an_odd_row_is_not_read(native: NativeBackend, threads: None) -> None:
    weight, bias = layer(40, 33)
    packed = native.pack_linear(weight, bias)
    x = torch.full((16, 34), torch.nan, dtype=torch.bfloat16)
    x[:, :33] = torch.randn(16, 33)
    for num_tokens in (1, 16):
        assert_near(native.linear(x[:num_tokens, :33], packed), x[:num_tokens, :33], weight, bias)


@pytest.mark.parametrize("x", [torch.ones(2, 8), torch.ones(2, 9).bfloat16(), torch.ones(8).bfloat16()])
def test_another_input_is_refused(native: NativeBackend, x: Tensor) -> None:
    packed = native.pack_linear(*layer(4, 8))
    with pytest.raises(ValueError, match=r"takes bfloat16 \[\*, 8\]"):
        native.linear(x, packed)


def test_other_types_go_to_onednn(native: NativeBackend) -> None:
    weight, bias = torch.randn(5, 8), torch.randn(5)
    packed = native.pack_linear(weight, bias)
    assert not isinstance(packed, PanelWeight)
    x = torch.randn(3, 8)
    torch.testing.assert_close(native.linear(x, packed), x @ weight.T + bias)
