"""Layers and experts with weights of few bits, in each format: against the numbers that `dequantize` makes of them."""

import pytest
import torch
from torch import Tensor

from quire.ops.backend import Backend
from quire.ops.cpu.experts import ExpertPanels
from quire.ops.cpu.native import NativeBackend
from quire.ops.cpu.quantized_panels import QuantizedPanelWeight
from quire.ops.experts import ExpertCall, ExpertWeights, UnlikeExpertsError
from quire.ops.linear import LinearWeight
from quire.ops.quantized import QuantizedWeight, dequantize
from tests.ops.levels import TESTED_WITH_INTEGERS, Level, in_turns
from tests.ops.test_quantized import random_weight

torch.set_num_threads(1)

INT4 = torch.arange(-8.0, 8.0)
TABLES = {
    "table": None,
    "int4": INT4,
    "two's complement": INT4.roll(8) / 2,
    "fp4": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    "line": INT4 * 0.25 + 0.5,
}
KINDS = ["int8", "float8_e4m3fn", "float8_e5m2", *TABLES]
SHAPES = [(70, 96, 32), (257, 528, 16), (33, 24, 12), (64, 2100, 700)]
"""(out, in, group). Groups end within a unit of 4 or 8 inputs, or are longer than the part dequantized at once."""


def weight_of(kind: str, out: int, size: int, group: int, *, is_rich: bool = False) -> QuantizedWeight:
    """A `rich` weight has offsets, and inputs in another order."""
    known = kind in TABLES
    weight = random_weight("table" if known else kind, out, size, group, has_offsets=is_rich, is_permuted=is_rich)
    table = TABLES.get(kind)
    return weight if table is None else weight._replace(table=table)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_rich", [False, True], ids=["scales", "offsets and order"])
def test_a_row_is_right_and_the_same_in_any_batch(native: NativeBackend, kind: str, is_rich: bool) -> None:
    for out, size, group in SHAPES:
        weight = weight_of(kind, out, size, group, is_rich=is_rich)
        packed = native.pack_linear(weight)
        assert isinstance(packed, QuantizedPanelWeight)
        x = torch.randn(110, size)
        together = native.linear(x, packed)
        expected = x.double() @ dequantize(weight).double().T
        largest = expected.abs().max().item()
        torch.testing.assert_close(together.double(), expected, atol=1e-5 * largest, rtol=0)
        for num_tokens in (1, 2, 3, 6, 7, 13):
            assert torch.equal(native.linear(x[:num_tokens], packed), together[:num_tokens]), num_tokens


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "table", "fp4"])
@pytest.mark.parametrize("is_rich", [False, True], ids=["scales", "offsets and order"])
@pytest.mark.parametrize("level", in_turns(TESTED_WITH_INTEGERS), ids=lambda level: level.name)
def test_bfloat16_loses_no_digits(level: Level, kind: str, is_rich: bool) -> None:
    """Beside codes that are no integers; but products of bfloat16 round a table to it."""
    ops = level.backend()
    for out, size, group in [*SHAPES, (40, 66, 33)]:
        weight = given = weight_of(kind, out, size, group, is_rich=is_rich)
        if level.has_panels and weight.table is not None:
            given = weight._replace(table=weight.table.bfloat16().float())
        packed, x = ops.pack_linear(weight), torch.randn(110, size).bfloat16()
        together, expected = ops.linear(x, packed), x.double() @ dequantize(given).double().T
        slack = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(together.double(), expected, atol=slack, rtol=2**-8)
        for num_tokens in (*range(1, 27), 40):
            assert torch.equal(ops.linear(x[:num_tokens], packed), together[:num_tokens]), num_tokens
        assert torch.equal(ops.linear(x[77:78], packed), together[77:78])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_may_have_two_bytes(native: NativeBackend, dtype: torch.dtype) -> None:
    weight = weight_of("int4", 40, 64, 32, is_rich=True)
    assert weight.offsets is not None
    weight = weight._replace(scales=weight.scales.to(dtype), offsets=weight.offsets.to(dtype))
    x = torch.randn(3, 64)
    expected = x @ dequantize(weight).T
    torch.testing.assert_close(native.linear(x, native.pack_linear(weight)), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_of_eight_bits(native: NativeBackend, kind: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).view(getattr(torch, kind)).view(256, 1)
    weight = QuantizedWeight(codes, torch.full((256, 1), 3.0))
    got = native.linear(torch.ones(1, 1).to(dtype), native.pack_linear(weight))[0]
    expected = dequantize(weight)[:, 0].to(dtype)
    is_finite = expected.isfinite()
    assert torch.equal(got[is_finite], expected[is_finite])
    assert got[~is_finite].isnan().all(), "codes that are no finite number show"


@pytest.mark.parametrize("kind", ["int4", "float8_e4m3fn"])
def test_a_recording_runs_on_new_inputs(own_native: NativeBackend, kind: str) -> None:
    packed = own_native.pack_gated_linear(weight_of(kind, 300, 64, 32, is_rich=True))
    x = torch.randn(3, 64)
    out, recording = own_native.record(lambda: own_native.gated_linear(x, packed))
    assert recording is not None
    x.copy_(torch.randn(3, 64))
    recording.run()
    assert torch.equal(out, own_native.gated_linear(x, packed))


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4), ("fp4", 4), ("float8_e5m2", 8)])
def test_packed_weights_are_as_large_as_the_format_says(own_native: NativeBackend, kind: str, bits: int) -> None:
    weight = weight_of(kind, 128, 256, 32)
    weight = weight._replace(scales=weight.scales.half())
    packed = own_native.pack_linear(weight)
    assert isinstance(packed, QuantizedPanelWeight)
    assert packed.panels.nbytes == 128 * 256 * bits // 8 + 128 * 8 * 2


@pytest.mark.parametrize("kind", ["int8", "int4", "fp4", "float8_e4m3fn"])
@pytest.mark.parametrize("is_rich", [False, True], ids=["scales", "offsets and order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(ops: Backend, kind: str, is_rich: bool, dtype: torch.dtype) -> None:
    def expert(index: int) -> ExpertWeights:
        layers = weight_of(kind, 2 * 48, 64, 16, is_rich=is_rich), weight_of(kind, 64, 48, 16, is_rich=is_rich)
        rolled = [layer._replace(codes=layer.codes.roll(index, 0)) for layer in layers]
        return ExpertWeights(*rolled)

    experts = [expert(index) for index in range(5)]
    packed = ops.pack_experts(iter(experts), 5)
    assert isinstance(packed, ExpertPanels) == isinstance(ops, NativeBackend)
    plain = [ExpertWeights(dequantize(e.gate_up), dequantize(e.down)) for e in experts]  # type: ignore[arg-type]
    reference = ops.pack_experts(iter(plain), 5)
    for num_tokens in (1, 2, 9, 120):
        x = torch.randn(num_tokens, 64).to(dtype)
        ids = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)])
        weights = torch.rand(num_tokens, 2)
        expected = ops.experts(reference, ExpertCall(x.float(), ids, weights))
        got = ops.experts(packed, ExpertCall(x, ids, weights))
        is_native = isinstance(ops, NativeBackend)
        # Activations between the layers become integers of 16 bits, or else numbers of the model's type.
        are_integers = is_native and kind in ("int8", "int4")
        slack, rounding = (1e-5, 1e-5) if dtype == torch.float32 else (1e-4 if are_integers else 2**-6, 2**-8)
        largest = expected.abs().max().item()
        torch.testing.assert_close(got.float(), expected, atol=slack * largest, rtol=rounding)
        if is_native:
            assert torch.equal(got[:1], ops.experts(packed, ExpertCall(x[:1], ids[:1], weights[:1])))


MIXES = {
    "down": ("int4", None, "int8"),
    "codes of two tables": ("fp4", None, "int4"),
    "all": ("int4", "int8", "fp4"),
    "ups of floats": ("int8", "float8_e4m3fn", "int4"),
    "plain ups": ("int4", "plain", "int8"),
    "plain gates": ("plain", "int8", "plain"),
}
"""Kinds of gates (and ups), of ups apart, and of downs."""


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("is_rich", [False, True], ids=["scales", "offsets and order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_an_expert_may_differ(ops: Backend, mix: str, is_rich: bool, dtype: torch.dtype) -> None:
    """Each keeps its codes, its groups, its table and its order of inputs; biases and weights of inputs are added."""
    first, other, last = MIXES[mix]
    size, hidden = 44, 70
    groups = {"int4": 14, "int8": 10, "fp4": 14, "float8_e4m3fn": 35, "plain": 0}

    def layer(kind: str, out: int, inputs: int, group: int) -> LinearWeight:
        if kind == "plain":
            return (torch.randn(out, inputs) / inputs**0.5).to(dtype)
        return weight_of(kind, out, inputs, group, is_rich=is_rich)

    def expert(index: int) -> ExpertWeights:
        weights = [
            layer(first, size if other else 2 * size, hidden, groups[first]),
            layer(last, hidden, size, 22 if last != "int8" else 11),
            *([layer(other, size, hidden, groups[other])] if other else []),
        ]
        gate_up, down, *ups = (
            weight._replace(codes=weight.codes.view(torch.uint8).roll(index, 0).view(weight.codes.dtype))
            if isinstance(weight, QuantizedWeight)
            else weight
            for weight in weights
        )
        return ExpertWeights(gate_up, down, torch.randn(2 * size).to(dtype), torch.randn(hidden).to(dtype), *ups)

    torch.manual_seed(3)
    experts = [expert(index) for index in range(5)]
    assert all(each.is_gated for each in experts)
    packed = ops.pack_experts(iter(experts), 5)
    assert isinstance(packed, ExpertPanels) == isinstance(ops, NativeBackend)
    plain = []
    for each in experts:
        ups = [] if each.up is None else [dequantized(each.up)]
        biases = [None if bias is None else bias.float() for bias in (each.gate_up_bias, each.down_bias)]
        plain.append(ExpertWeights(torch.cat([dequantized(each.gate_up), *ups]), dequantized(each.down), *biases))
    reference = ops.pack_experts(iter(plain), 5)
    for num_tokens, weighs_inputs in ((1, False), (2, True), (9, False), (120, True)):
        x = torch.randn(num_tokens, hidden).to(dtype)
        ids, weights = torch.rand(num_tokens, 5).argsort(1)[:, :2].contiguous(), torch.rand(num_tokens, 2)
        expected = ops.experts(reference, ExpertCall(x.float(), ids, weights, "gelu_tanh", weighs_inputs=weighs_inputs))
        got = ops.experts(packed, ExpertCall(x, ids, weights, "gelu_tanh", weighs_inputs=weighs_inputs))
        error = (got.float() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2), "activations of 8 bits beside those of 4"
        if isinstance(ops, NativeBackend):
            one = ops.experts(packed, ExpertCall(x[:1], ids[:1], weights[:1], "gelu_tanh", weighs_inputs=weighs_inputs))
            assert torch.equal(got[:1], one)
    for to, source in zip(ops.expert_tensors(packed, 1), ops.expert_tensors(packed, 3), strict=True):
        to.copy_(source)
    ids = torch.full((9, 1), 1)
    x, weights = torch.randn(9, hidden).to(dtype), torch.rand(9, 1)
    own, others = (ops.experts(packed, ExpertCall(x, each, weights)) for each in (ids, ids + 2))
    assert torch.equal(own, others)


def dequantized(weight: LinearWeight) -> Tensor:
    return dequantize(weight) if isinstance(weight, QuantizedWeight) else weight.float()


@pytest.mark.parametrize("other", ["int8", "fp4", "plain", "offsets", "byte inputs", "ups apart", "bias"])
def test_experts_of_a_layer_that_are_unlike_are_refused(ops: Backend, other: str) -> None:
    """Their layouts would have other sizes, or stand for other numbers."""

    def expert(kind: str) -> ExpertWeights:
        gate_up, down = weight_of("int4", 64, 64, 16), weight_of("int4", 64, 32, 16)
        match kind:
            case "plain":
                return ExpertWeights(torch.randn(64, 64), down)
            case "ups apart":
                return ExpertWeights(gate_up.rows(slice(32)), down, up=torch.randn(32, 64))
            case "bias":
                return ExpertWeights(gate_up, down, torch.randn(64))
            case "byte inputs":
                return ExpertWeights(gate_up._replace(has_byte_inputs=True), down)
            case "offsets":
                return ExpertWeights(weight_of("int4", 64, 64, 16, is_rich=True), down)
        return ExpertWeights(weight_of(kind, 64, 64, 16), down)

    for first, second in (("int4", other), (other, "int4")):
        with pytest.raises(UnlikeExpertsError, match="experts 0 and 1 of a layer are stored in different ways"):
            ops.pack_experts([expert(first), expert(second)], 2)
