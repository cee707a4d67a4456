"""Layers whose codes are integers, with activations of 8 bits: against their formula (`kernels/words.h`).

For each row and block of inputs, `q = round(x * (127 / largest))`, which stands for `q * (largest / 127)`. AVX2 takes
the largest sum of two neighbours of one sign beside codes of 8 bits, so that two products fit 16 bits. With AVX512-VNNI
`largest / 127` is rounded up to 1, 1.25, 1.5 or 1.75 times a power of two.
"""

import logging
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from quire.ops.cpu.activation_bits import ActivationBits
from quire.ops.cpu.codecs import INT4, INT8
from quire.ops.cpu.native import NativeBackend
from quire.ops.experts import ExpertCall, ExpertWeights
from quire.ops.quantized import QuantizedWeight, dequantize
from tests.ops.levels import RUNNABLE, TESTED_WITH_INTEGERS, ByteProducts, Level
from tests.ops.test_quantized_linear import TABLES, weight_of

torch.set_num_threads(1)

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half a digit of the result."""
SHAPES = [(70, 96, 32), (257, 528, 16), (33, 24, 12), (64, 2100, 700), (40, 66, 6), (50, 192, 64)]
"""(out, in, group)."""
KINDS = ["int8", "int4", "line", "two's complement"]


def with_byte_products() -> Iterable[Level]:
    return (level for level in TESTED_WITH_INTEGERS if level.has_byte_products)


@pytest.fixture(scope="module", params=with_byte_products(), ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Level:
    return request.param


@pytest.fixture(scope="module")
def ops(level: Level) -> NativeBackend:
    return level.backend(8)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def products(level: Level, kind: str) -> ByteProducts:
    return level.byte_products(8 if kind == "int8" else 4)


def rounded(x: Tensor, group: int, products: ByteProducts) -> Tensor:
    """What the kernels multiply, in float32."""
    blocks = [part for whole in x.float().split(group, -1) for part in whole.split(products.block, -1)]
    return torch.cat([_rounded_block(part, products) for part in blocks], -1)


def _rounded_block(x: Tensor, products: ByteProducts) -> Tensor:
    largest, most = x.abs().amax(-1, keepdim=True), torch.tensor(127.0)
    if products.adds_neighbours:  # the first and the third of four, and the second and the fourth
        pairs = torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)).unflatten(-1, (-1, 2, 2))
        sums = torch.cat([pairs.clamp(min=0), -pairs.clamp(max=0)], -1).sum(-2)
        largest = sums.amax((-1, -2))[..., None]
    if not products.steps_an_octave:
        return (x * torch.nan_to_num(most / largest, posinf=0)).round() * (largest / most)
    part = 2**23 // products.steps_an_octave  # of a float32's bits
    step = (((largest / most).view(torch.int32) + part - 1) & -part).view(torch.float32)
    return (x * torch.nan_to_num(1 / step, posinf=0)).round() * step


def product(x: Tensor, weight: QuantizedWeight, products: ByteProducts) -> tuple[Tensor, float]:
    """[rows, out] in float64, and what sums in float32 may differ by."""
    given = x if weight.input_order is None else x[:, weight.input_order]
    inputs = rounded(given, weight.group_size, products).double()
    numbers = dequantize(weight._replace(input_order=None)).double()
    return inputs @ numbers.T, 4e-6 * (inputs.abs() @ numbers.abs().T).max().item()


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("kind", ["int8", "int4"], indirect=True)
@pytest.mark.parametrize(("size", "group"), [(64, 32), (300, 300), (60, 12), (34, 34), (512, 256), (128, 64)])
def test_what_becomes_of_activations(
    ops: NativeBackend, products: ByteProducts, kind: str, dtype: torch.dtype, size: int, group: int
) -> None:
    """To the bit: each output of this layer is one input."""
    ones, scales = torch.eye(size).to(torch.int8), torch.ones(size, size // group)
    identity = QuantizedWeight(ones, scales)
    if kind == "int4":
        codes = (ones + 8).view(torch.uint8)
        identity = QuantizedWeight(codes[:, ::2] | codes[:, 1::2] << 4, scales, TABLES["int4"])
    x = (torch.randn(9, size) * torch.randn(9, size).exp()).to(dtype)
    x[:, 5] = 0.5 * x[:, 4]  # halves of the largest, among others
    assert torch.equal(ops.linear(x, ops.pack_linear(identity)), rounded(x, group, products).to(dtype))


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("is_rich", [False, True], ids=["scales", "offsets and order"])
def test_a_row_is_right_and_the_same_in_any_batch(
    ops: NativeBackend, products: ByteProducts, kind: str, dtype: torch.dtype, is_rich: bool
) -> None:
    for out, size, group in SHAPES:
        weight = weight_of(kind, out, size, group, is_rich=is_rich)
        packed = ops.pack_linear(weight)
        x = torch.randn(230, size).to(dtype)
        together = ops.linear(x, packed)
        expected, slack = product(x, weight, products)
        torch.testing.assert_close(together.double(), expected, rtol=ROUNDING[dtype], atol=slack)
        for num_tokens in (*range(1, 27), 40, 97):
            assert torch.equal(ops.linear(x[:num_tokens], packed), together[:num_tokens]), num_tokens
        assert torch.equal(ops.linear(x[77:78], packed), together[77:78])


def test_ranks_round_what_one_rank_would(ops: NativeBackend, products: ByteProducts, kind: str) -> None:
    """Where their parts begin with a group."""
    weight = weight_of(kind, 40, 192, 32)
    x, per = torch.randn(5, 192).half(), 1 if weight.table is None else 2
    whole, slack = product(x, weight, products)
    total = torch.zeros_like(whole)
    for inputs in (slice(64), slice(64, 192)):
        part = weight._replace(
            codes=weight.codes[:, inputs.start and inputs.start // per : inputs.stop // per],
            scales=weight.scales[:, inputs.start and inputs.start // 32 : inputs.stop // 32],
        )
        total += ops.linear(x[:, inputs], ops.pack_linear(part)).double()
    torch.testing.assert_close(total, whole, rtol=0, atol=slack + 2**-10 * whole.abs().max().item())


@pytest.mark.parametrize("kind", ["int8", "int4"], indirect=True)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("is_least", [True, False])
def test_the_largest_sums_fit(ops: NativeBackend, products: ByteProducts, kind: str, sign: int, is_least: bool) -> None:
    """Each product has the same sign, and is as large as products can be."""
    size, scales = 384, torch.ones(5, 1)
    code = (-128 if is_least else 127) if kind == "int8" else (-8 if is_least else 7)
    weight = QuantizedWeight(torch.full((5, size), code, dtype=torch.int8), scales)
    if kind == "int4":
        weight = QuantizedWeight(torch.full((5, size // 2), (code + 8) * 17, dtype=torch.uint8), scales, TABLES["int4"])
    x = torch.full((30, size), sign * 127.0, dtype=torch.bfloat16)
    x[::2, ::4] = 1.0  # with neighbours that keep all 8 bits
    expected = rounded(x, size, products).sum(-1, keepdim=True) * code
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), expected.expand(30, 5).bfloat16())


@pytest.mark.parametrize("kind", ["int8", "int4"], indirect=True)
@pytest.mark.parametrize("magnitude", [0.0, 2.0**-100, 1e-20, 1e30])
def test_any_magnitude(ops: NativeBackend, products: ByteProducts, kind: str, magnitude: float) -> None:
    weight = weight_of(kind, 40, 64, 32, is_rich=True)
    x = (torch.randn(7, 64) * magnitude).bfloat16()
    expected, slack = product(x, weight, products)
    got = ops.linear(x, ops.pack_linear(weight)).double()
    torch.testing.assert_close(got, expected, rtol=2**-8, atol=slack)


@pytest.mark.parametrize("kind", ["int8", "int4"], indirect=True)
def test_numbers_that_no_layer_makes_have_a_result_or_none(ops: NativeBackend, kind: str) -> None:
    """From 2^110 on a block may count as one without a finite number, but never becomes another number."""
    weight = weight_of(kind, 40, 64, 32)
    packed, x = (
        ops.pack_linear(weight),
        torch.randn(4, 64).sign() * torch.tensor([2.0**109, 2.0**111, 2.0**120, 2.0**126])[:, None],
    )
    got, expected = ops.linear(x.bfloat16(), packed).double(), x.double() @ dequantize(weight).double().T
    assert got[0].isfinite().all()
    close = (got - expected).abs() <= 0.02 * expected.abs().amax(-1, keepdim=True)
    assert (close | ~got.isfinite()).all()


def test_numbers_that_are_hardly_normal_may_become_zeros(ops: NativeBackend) -> None:
    out = ops.linear(torch.full((2, 32), 1e-39).bfloat16(), ops.pack_linear(weight_of("int4", 8, 32, 32)))
    assert out.abs().max().item() < 1e-30


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["int8", "int4"], indirect=True)
def test_a_row_without_a_number_has_no_result(ops: NativeBackend, kind: str, wrong: float) -> None:
    """And the other rows have theirs."""
    packed, x = ops.pack_linear(weight_of(kind, 40, 64, 32, is_rich=True)), torch.randn(9, 64).bfloat16()
    right = ops.linear(x, packed)
    x[4, 33] = wrong
    got = ops.linear(x, packed)
    assert not got[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(got[others], right[others])


@pytest.mark.parametrize("kind", ["int8", "int4"], indirect=True)
def test_a_gated_layer_is_the_plain_one_activated_on_any_threads(ops: NativeBackend, kind: str) -> None:
    weight = weight_of(kind, 1000, 320, 32)
    gated, plain, x = ops.pack_gated_linear(weight), ops.pack_linear(weight), torch.randn(70, 320).bfloat16()
    expected = ops.activate_and_mul(ops.linear(x, plain))
    for threads in (1, 4):
        torch.set_num_threads(threads)
        try:
            for rows in (1, 2, 70):
                assert torch.equal(ops.gated_linear(x[:rows], gated), expected[:rows])
        finally:
            torch.set_num_threads(1)


def test_float32_keeps_its_digits(ops: NativeBackend) -> None:
    weight, x = weight_of("int4", 40, 64, 32), torch.randn(3, 64)
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight)), x @ dequantize(weight).T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4"], indirect=True)
def test_experts_round_what_both_layers_read(ops: NativeBackend, products: ByteProducts, kind: str) -> None:
    size, hidden, num_experts = 48, 64, 4
    experts = [
        ExpertWeights(weight_of(kind, 2 * size, hidden, 32), weight_of(kind, hidden, size, 16))
        for _ in range(num_experts)
    ]
    packed, x = ops.pack_experts(experts, num_experts), torch.randn(50, hidden).half()
    ids = torch.randint(num_experts, (50, 1))
    got = ops.experts(packed, ExpertCall(x, ids, torch.ones(50, 1)))

    def computed(is_rounded: bool) -> Tensor:
        out = torch.empty(50, hidden, dtype=torch.float64)
        for row, [expert] in enumerate(ids.tolist()):
            gate_up, down = experts[expert].gate_up, experts[expert].down
            assert isinstance(gate_up, QuantizedWeight)
            assert isinstance(down, QuantizedWeight)
            inputs = rounded(x[row], 32, products) if is_rounded else x[row]
            gate, up = (dequantize(gate_up).double() @ inputs.double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            inner = rounded(inner, 16, products).double() if is_rounded else inner
            out[row] = dequantize(down).double() @ inner
        return out

    error, without = ((got.double() - computed(is_rounded)).abs().mean() for is_rounded in (True, False))
    assert error < without / 4
    for num_tokens in (1, 2, 13):
        part = ops.experts(packed, ExpertCall(x[:num_tokens], ids[:num_tokens], torch.ones(num_tokens, 1)))
        assert torch.equal(part, got[:num_tokens])


@pytest.mark.parametrize("level", TESTED_WITH_INTEGERS, ids=lambda level: level.name)
def test_which_activations_have_8_bits(level: Level, caplog: pytest.LogCaptureFixture) -> None:
    """Where the instructions can: beside codes of four bits, and where the weight's makers rounded them."""
    backend, both = level.backend(None), {bits: level.backend(bits) for bits in (8, 16)}
    x, beside = torch.randn(3, 64).half(), {}
    caplog.set_level(logging.INFO, "quire")
    for name, weight in {
        "int4": weight_of("int4", 8, 64, 32),
        "int8": weight_of("int8", 8, 64, 32),
        "bytes": weight_of("int8", 8, 64, 32)._replace(has_byte_inputs=True),
    }.items():
        got = backend.linear(x, backend.pack_linear(weight))
        beside[name] = [n for n, each in both.items() if torch.equal(got, each.linear(x, each.pack_linear(weight)))]
    if level.has_byte_products:
        assert beside == {"int4": [8], "int8": [16], "bytes": [8]}
    else:  # both choices are the same
        assert beside == {"int4": [8, 16], "int8": [8, 16], "bytes": [8, 16]}
    is_said = any("rounded to 8 bits" in record.message for record in caplog.records)
    assert is_said == level.has_byte_products


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kernels, least = RUNNABLE[0].kernels(), 8 if RUNNABLE[0].has_byte_products else 16
    caplog.set_level(logging.INFO, "quire")
    for text, int8, int4 in [("", 16, 8), ("16", 16, 16), ("8", 8, 8)]:
        monkeypatch.setenv("QUIRE_CPU_ACTIVATION_BITS", text)
        bits = ActivationBits.asked(kernels)
        assert bits.of(torch.bfloat16, INT8, has_byte_inputs=False) == max(int8, least)
        assert bits.of(torch.bfloat16, INT4, has_byte_inputs=False) == max(int4, least)
        assert bits.of(torch.float32, INT4, has_byte_inputs=True) == 32
        bits.say(INT8, has_byte_inputs=False, is_dry=True)
        assert not caplog.records
    for _ in range(2):
        bits.say(INT8, has_byte_inputs=False, is_dry=False)
    assert len(caplog.records) == 1, "it is said once"
    monkeypatch.setenv("QUIRE_CPU_ACTIVATION_BITS", "12")
    with pytest.raises(ValueError, match="QUIRE_CPU_ACTIVATION_BITS must be 8 or 16, got '12'"):
        ActivationBits.asked(kernels)
