"""Norm, rotation, activation and rows against their formulas, at odd sizes too."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from quire.ops import bind
from quire.ops.activations import PlainActivation
from quire.ops.backend import Backend, NewHeads
from quire.ops.cpu.native import NativeBackend

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def rms_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (33, 1000), (2, 129)])
def test_rms_norm(ops: Backend, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    before = x.clone()
    assert_near(ops.rms_norm(x, weight, 1e-5), rms_formula(x, weight, 1e-5), dtype)
    assert torch.equal(x, before)


def test_rms_norm_of_nearly_nothing_leans_on_eps(ops: Backend) -> None:
    x = torch.full((2, 8), 1e-6)
    assert_near(ops.rms_norm(x, torch.ones(8), 1e-6), rms_formula(x, torch.ones(8), 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_a_weight_per_head(ops: Backend, dtype: torch.dtype) -> None:
    heads = torch.randn(5, 9, 24).to(dtype)[:, :6]  # a view, as when values follow queries and keys
    weight = torch.randn(6, 24).to(dtype)
    assert_near(ops.rms_norm(heads, weight, 1e-6), rms_formula(heads, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(ops: Backend, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(7, 50).to(dtype), torch.randn(7, 50).to(dtype), torch.randn(50).to(dtype)
    total = x + residual
    out, new_residual = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert torch.equal(new_residual, total)
    assert_near(out, rms_formula(total, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (40, 40), (64, 16), (80, 32)])
def test_rotary_multiplies_complex_numbers(ops: Backend, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, head_dim).to(dtype)
    angles = torch.rand(5, 1, rotary_dim // 2) * 100
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    pairs = torch.complex(x[..., : rotary_dim // 2].double(), x[..., rotary_dim // 2 : rotary_dim].double())
    turned = pairs * torch.polar(torch.ones_like(angles).double(), angles.double())
    expected = torch.cat((turned.real, turned.imag, x[..., rotary_dim:].double()), dim=-1)
    assert_near(ops.rotary(x, cos, sin), expected, dtype)


@pytest.mark.parametrize(
    ("dtype", "norm"), [(dtype, norm) for dtype in DTYPES for norm in dict.fromkeys((None, dtype, torch.float32))]
)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "is_interleaved"), [(32, 32, False), (80, 24, False), (80, 24, True)]
)
def test_rotate_and_store_is_norm_rotation_and_write(
    ops: Backend, head_dim: int, rotary_dim: int, is_interleaved: bool, dtype: torch.dtype, norm: torch.dtype | None
) -> None:
    heads = torch.randn(5, 10, head_dim).to(dtype)  # 4 query heads, 3 keys, 3 values
    cos, sin = torch.randn(2, 5, 1, rotary_dim).to(dtype)
    weight, slots = torch.randn(7, head_dim).to(norm or dtype), torch.tensor([9, 2, 3, 7, 0])
    cache, expected_cache = torch.zeros(2, *ops.kv_cache_shape(4, 3, 3, head_dim, dtype), dtype=dtype)
    memory = torch.zeros(4, cache[0].numel() + 5, dtype=dtype)  # pages that lie apart
    apart = memory[:, 2:-3].unflatten(1, cache.shape[1:])
    options = {"norm": None if norm is None else (weight, 1e-5), "is_interleaved": is_interleaved}
    assert torch.equal(
        ops.rotate_and_store(NewHeads(heads, cos, sin, apart, slots, **options)),
        ops.rotate_and_store(NewHeads(heads, cos, sin, cache, slots, **options)),
    )
    assert torch.equal(apart, cache)
    assert not memory[:, :2].any()
    assert not memory[:, -3:].any()
    cache.zero_()
    q = ops.rotate_and_store(NewHeads(heads, cos, sin, cache, slots, **options))

    qk = heads[:, :7] if norm is None else ops.rms_norm(heads[:, :7], weight, 1e-5)
    if is_interleaved:
        qk = torch.cat((qk[..., :rotary_dim:2], qk[..., 1:rotary_dim:2], qk[..., rotary_dim:]), dim=-1)
    rotated = ops.rotary(qk, cos, sin)
    ops.write_kv(rotated[:, 4:], heads[:, 7:], expected_cache, slots)
    assert torch.equal(q, rotated[:, :4])
    assert torch.equal(cache, expected_cache)
    assert cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 300])
def test_silu_and_mul(ops: Backend, size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 2 * size) * 3).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(ops.activate_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 300])
def test_gelu_and_mul(ops: Backend, size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 2 * size) * 3).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    assert_near(ops.activate_and_mul(x, "gelu_tanh"), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 300])
def test_clamped_swiglu(ops: Backend, size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 2 * size) * 8).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    expected = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    assert_near(ops.activate_and_mul(x, "clamped_swiglu"), expected, dtype)
    assert ops.activate_and_mul(torch.full((1, 2), torch.nan).to(dtype), "clamped_swiglu").isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 300])
def test_clamped_silu(ops: Backend, size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 2 * size) * 10).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    expected = F.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    assert_near(ops.activate_and_mul(x, "clamped_silu"), expected, dtype)
    assert ops.activate_and_mul(torch.full((1, 2), torch.nan).to(dtype), "clamped_silu").isnan().all()


ACTIVATIONS: dict[PlainActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_with_and_without_a_gate(ops: Backend, activation: PlainActivation, dtype: torch.dtype) -> None:
    x = torch.cat((torch.randn(5, 37) * 3, torch.linspace(-30, 30, 37 * 20).view(20, 37))).to(dtype)
    expected = ACTIVATIONS[activation](x.double())
    assert_near(ops.activate(x.clone(), activation), expected, dtype)
    up = torch.randn(25, 37).to(dtype)
    assert_near(ops.activate_and_mul(torch.cat((x, up), dim=1), activation), expected * up.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(ops: Backend, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (3, 7), (33, 1000), (2, 129)):
        x, weight, bias = (torch.randn(shape[dim:]).to(dtype) for dim in (0, 1, 1))
        x += 3
        for given in ((weight, bias), (weight, None), (None, None), (weight.float(), bias.float())):
            double = [None if tensor is None else tensor.double() for tensor in given]
            expected = F.layer_norm(x.double(), shape[1:], *double, eps=1e-5)
            assert_near(ops.layer_norm(x, *given, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_layer_norm(ops: Backend, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (3, 7), (33, 1000), (2, 129)):
        x, residual, weight, bias = (torch.randn(shape[dim:]).to(dtype) for dim in (0, 0, 1, 1))
        total = x + residual
        for given in ((weight, bias), (weight, None), (None, None), (weight.float(), bias.float())):
            out, new_residual = ops.add_layer_norm(x, residual.clone(), *given, 1e-5)
            assert torch.equal(new_residual, total)
            assert torch.equal(out, ops.layer_norm(total, *given, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_with_a_weight_per_head(ops: Backend, dtype: torch.dtype) -> None:
    heads, weight = torch.randn(5, 9, 24).to(dtype)[:, :6], torch.randn(6, 24).to(dtype)
    expected = F.layer_norm(heads.double(), (24,), eps=1e-12) * weight.double()
    assert_near(ops.layer_norm(heads, weight, None, 1e-12), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 50, 9001])
def test_sums_factors_and_caps(ops: Backend, size: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(7, size).to(dtype), torch.randn(7, size).to(dtype)
    assert torch.equal(ops.add(x, residual.clone()), x + residual)
    assert torch.equal(ops.scale(x.clone(), 0.3), x * 0.3)
    assert_near(ops.scale(x.clone(), 2.0, 1.5), 1.5 * torch.tanh(x.double() * 2 / 1.5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 3000])
def test_join(ops: Backend, num_tokens: int, dtype: torch.dtype) -> None:
    wide = torch.randn(num_tokens, 40).to(dtype)
    parts = [wide[:, 3:10], torch.randn(num_tokens, 1).to(dtype), wide[:, 20:]]
    got = ops.join(parts)
    assert torch.equal(got, torch.cat(parts, dim=1))
    assert got.is_contiguous()


def test_joined_columns_are_recorded(native: NativeBackend) -> None:
    wide = torch.randn(3, 40)
    got, recording = native.record(lambda: native.join([wide[:, :7], wide]))
    assert recording is not None
    wide.neg_()
    recording.run()
    assert torch.equal(got, torch.cat((wide[:, :7], wide), dim=1))


def test_take_rows(ops: Backend) -> None:
    weight = torch.randn(11, 6)
    assert torch.equal(ops.take_rows(weight, torch.tensor([10, 0, 10])), weight[[10, 0, 10]])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_take_rows_with_a_scale(ops: Backend, dtype: torch.dtype) -> None:
    weight = torch.randn(11, 37).to(dtype)
    before = weight.clone()
    assert torch.equal(ops.take_rows(weight, torch.tensor([10, 0, 10]), 5.75), weight[[10, 0, 10]] * 5.75)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_with_a_weight_in_float32_is_rounded_once(ops: Backend, dtype: torch.dtype) -> None:
    x, residual = torch.randn(7, 51).to(dtype), torch.randn(7, 51).to(dtype)
    weight = 1 + 1e-3 * torch.randn(51)  # which bfloat16 cannot tell from 1
    got = ops.rms_norm(x, weight, 1e-6)
    assert (got == rms_formula(x, weight, 1e-6).to(dtype)).float().mean() > 0.95
    assert got.dtype == dtype
    added, total = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert torch.equal(added, ops.rms_norm(total, weight, 1e-6))


def test_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="abacus"):
        bind("abacus")
