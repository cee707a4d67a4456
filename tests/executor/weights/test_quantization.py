"""Weights that are made smaller at load: how they are rounded, how ranks share them, and what the outputs become."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.core.config.load import LoadConfig
from quire.core.config.quantization import Quantization
from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.dummy import DummyWeights
from quire.executor.weights.quantization.checkpoint_format import CheckpointFormat
from quire.executor.weights.quantization.int8 import quantize
from quire.executor.weights.quantization.online import ONLINE, Online
from quire.executor.weights.quantization.scheme import LinearPart, LinearScheme
from quire.executor.weights.quantization.schemes import choose_scheme
from quire.executor.weights.quantization.unquantized import Unquantized
from quire.executor.weights.readers import Shard, TensorSource
from quire.ops.linear import LinearWeight
from quire.ops.quantized import QuantizedWeight, dequantize
from tests.checkpoints import FAMILIES, Family
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)


def widened(weight: QuantizedWeight) -> Tensor:
    return weight.codes.float() * weight.scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_become_the_nearest_of_255(dtype: torch.dtype) -> None:
    weight = torch.randn(37, 50).to(dtype)
    weight[5] = 0
    quantized = quantize(weight)
    assert (quantized.codes.dtype, quantized.scales.dtype) == (torch.int8, torch.float32)
    assert torch.equal(quantized.scales, weight.float().abs().amax(1, keepdim=True) / 127)
    assert ((widened(quantized) - weight.float()).abs() <= quantized.scales * 0.50001).all()
    assert quantized.codes.abs().amax() == 127
    assert torch.equal(quantize(-weight).codes, -quantized.codes)
    assert not widened(quantized)[5].any()


def test_parts_that_are_rounded_one_by_one_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 50)
    whole = quantize(weight)
    monkeypatch.setattr("quire.executor.weights.quantization.int8._PART", 170)
    for tensor, expected in zip(quantize(weight)[:2], whole[:2], strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_output_with_a_bad_weight_is_no_number(bad: float) -> None:
    weight = torch.randn(3, 8)
    weight[1, 2] = bad
    assert widened(quantize(weight)).isnan().any(1).tolist() == [False, True, False]


def test_ranks_hold_the_numbers_of_the_whole() -> None:
    reader, scheme = DummyWeights(torch.bfloat16, seed=0), ONLINE["int8"]
    shards = ((0, 16), (0, 8), (8, 16))
    column, first, second = (scheme.read_weight(reader, LinearPart("q", 16, Shard(0, *ends)), 20) for ends in shards)
    for tensor, one, two in zip(column[:2], first[:2], second[:2], strict=True):
        assert torch.equal(tensor, torch.cat((one, two)))

    row, *rows = (
        scheme.read_weight(reader, LinearPart("o", 16, Shard(1, start, stop)), 20)
        for start, stop in ((0, 20), (0, 10), (10, 20))
    )
    assert torch.equal(row.codes, torch.cat([part.codes for part in rows], dim=1))
    assert all(torch.equal(part.scales, row.scales) for part in rows)
    assert all(part.codes.untyped_storage().nbytes() == 16 * 10 for part in rows), "the rest of the row is gone"


PROMPT = list(range(5, 69))


class Widened(Online):
    """The same numbers, in float32."""

    def read_weight(self, source: TensorSource, part: LinearPart, in_features: int) -> Tensor:
        weight = super().read_weight(source, part, in_features)
        return widened(weight) if isinstance(weight, QuantizedWeight) else weight

    def for_head(self, rows: LinearWeight, part: LinearPart) -> Tensor:
        return widened(super().for_head(rows, part))


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_the_rounded_weights(family: Family, checkpoint: Checkpoints) -> None:
    """Outputs differ from the checkpoint's as much as those of bfloat16 do, in random models with wide logits."""
    spec = read_spec(checkpoint(family, num_hidden_layers=6 if family == "gemma3" else 2))

    def logprobs(scheme: LinearScheme) -> Tensor:
        context = replace(model_context(spec), scheme=scheme)
        with contextlib.closing(context.weights), torch.inference_mode():
            model = build_model(spec, context)
        return PagedDriver(model, 1, 80).step({0: PROMPT})[0].log_softmax(-1)

    exact, same_numbers, got = (logprobs(scheme) for scheme in (Unquantized(), Widened(quantize), ONLINE["int8"]))
    torch.testing.assert_close(got, same_numbers, atol=1e-3, rtol=0)
    # A quarter of the differences: a token that now goes to other experts differs far. Cohere's logits are small.
    assert 0.0005 < (got - exact).abs().quantile(0.25) < 0.1


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {"tie": True}), ("gemma3", {})],
)
def test_two_ranks_give_the_tokens_of_one(family: Family, options: dict[str, Any], checkpoint: Checkpoints) -> None:
    spec = read_spec(checkpoint(family, **options))

    def greedy(group: ParallelGroup) -> list[int]:
        model = load_model(spec, group=group, quantization="int8")
        return PagedDriver(model, 1, 120).greedy([PROMPT[:20]], 40)[0]

    expected = greedy(ParallelGroup())
    assert len(set(expected)) > 5
    assert on_every_rank(2, greedy) == [expected, expected]


@pytest.mark.parametrize(("dtype", "is_tied"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_linear_layers_take_a_byte_a_number(dtype: str, is_tied: bool, checkpoint: Checkpoints) -> None:
    """And so does the head; an embedding of its own takes as many bytes as before."""
    spec = read_spec(checkpoint("llama", hidden_size=256, intermediate_size=512, tie=is_tied), dtype=dtype)
    dummy = LoadConfig(load_format="dummy")
    plain, small = (
        held_bytes(load_model(spec, load=dummy, quantization=quantization)) for quantization in (None, "int8")
    )
    linear = 2 * (4 * 256 * 256 - 2 * 256 * 128 + 3 * 256 * 512) + spec.vocab_size * 256
    saved = linear * (torch.empty(0, dtype=getattr(torch, dtype)).element_size() - 1)
    assert plain - small == pytest.approx(saved, rel=0.02)


def test_layers_without_whole_groups_take_no_more_than_before(checkpoint: Checkpoints) -> None:
    """They stay as they are, fused or not; the head takes about half, however much padding its panels have."""
    spec = read_spec(checkpoint("llama", hidden_size=48, intermediate_size=80), dtype="bfloat16")
    plain, small = (held_bytes(load_model(spec, quantization=quantization)) for quantization in (None, "int4"))
    head = held_bytes(model_context(spec).ops.pack_linear(torch.zeros(spec.vocab_size, 48, dtype=torch.bfloat16)))
    assert 0.4 * head < plain - small < 0.65 * head


@pytest.mark.parametrize(
    ("own", "asked", "message"),
    [
        ("awq", "int8", r"quantized \(awq\), and --quantization int8 names something else"),
        ("awq", "gptq", r"quantized \(awq\), and --quantization gptq names something else"),
        ("aqlm", None, r"quantized \(aqlm\), which is not read; compressed-tensors, gptq, .*--quantization int8"),
        (None, "awq", "is not quantized, and --quantization awq names a format of checkpoints.* int8 or fp8"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(
    own: str | None, asked: Quantization | None, message: str, checkpoint: Checkpoints
) -> None:
    config = {"quantization_config": {"quant_method": own}} if own else {}
    spec = read_spec(checkpoint("llama"), **config)
    with pytest.raises(ModelLoadError, match=message):
        choose_scheme(spec, asked)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            (
                {"quant_method": "awq", "bits": bits, "version": version},
                rf"AWQ of {bits} bits in the order {version} is not read; take a checkpoint of 4 bits\.",
            )
            for bits, version in ((3, "gemm"), (8, "gemv"))
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}},
            r"Weights that a transform \(QuIP, SpinQuant\) turned are not read; take others\.",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:ark", "sym": False},
            r"AutoRound's packing auto_round:ark is not read; take auto_round:auto_gptq or auto_round:auto_awq\.",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp6_e2m3"}},
                "layer_quant_config": {"*down_proj": {"weight": {"dtype": "fp6_e3m2"}}},
            },
            r"Quark's fp6_e2m3 and fp6_e3m2 in one checkpoint are not read; take one with either\.",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "uint4"}},
                "layer_quant_config": {"*down_proj": {"weight": {"dtype": "int4"}}},
            },
            r"Quark's int4 and uint4 in one checkpoint are not read; take one with either\.",
        ),
    ],
)
def test_a_variant_that_is_not_read_is_refused(config: dict[str, Any], message: str, checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelLoadError, match=message):
        choose_scheme(read_spec(checkpoint("llama"), quantization_config=config), None)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *(("int8", 0.00797), ("fp8", 0.0264), ("fp8_per_tensor", 0.0264), ("fp8_per_block", 0.0264)),
        *(("mxfp8", 0.0294), ("int4", 0.0856), ("mxfp4", 0.1148), ("bitsandbytes", 0.092)),
    ],
)
def test_each_rounding_takes_the_nearest_numbers(name: str, error: float) -> None:
    """Relative errors of normal numbers, in root mean squares; as large as those of any other scale, or smaller."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    weight[3, :64] = 0
    rounded = ONLINE[name].rounding(weight)
    numbers = dequantize(rounded)
    assert ((numbers - weight).norm() / weight.norm()).item() == pytest.approx(error, rel=0.02)
    assert not numbers[3, :64].any()
    meta = ONLINE[name].rounding(weight.to("meta"))
    assert [(part.shape, part.dtype) if isinstance(part, Tensor) else part for part in meta] == [
        (part.shape, part.dtype) if isinstance(part, Tensor) else part for part in rounded
    ]


@pytest.mark.parametrize("name", ["fp8_per_tensor", "fp8_per_block", "mxfp8"])
def test_scales_are_shared_as_the_name_says(name: str) -> None:
    """Also of a layer that is rounded in parts, and whose last block of outputs is short."""
    weight = torch.randn(1180, 1024, generator=torch.Generator().manual_seed(0))
    rounded = ONLINE[name]._rounded(weight)
    scales, numbers = rounded.scales.float(), dequantize(rounded)
    assert ((numbers - weight).norm() / weight.norm()).item() < 0.03
    if name == "mxfp8":
        assert scales.shape == (1180, 32)
        assert torch.equal(scales.frexp().mantissa, torch.full_like(scales, 0.5))
        return
    size = {"fp8_per_tensor": 1180, "fp8_per_block": 128}[name]
    assert scales.shape == (1180, 1 if name == "fp8_per_tensor" else 8)
    for block, numbers_of_block in zip(scales.split(size), weight.split(size), strict=True):
        largest = numbers_of_block.abs().unflatten(1, (scales.shape[1], -1)).amax((0, 2))
        assert torch.equal(block, (largest / 448).expand_as(block))


def test_mxfp8_clamps_what_its_power_of_two_does_not_reach() -> None:
    weight = torch.tensor([[1.99, -1.99, *[0.5] * 30]])
    assert dequantize(ONLINE["mxfp8"].rounding(weight)).tolist() == [[1.75, -1.75, *[0.5] * 30]]


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "moe_wna16"),
        ({"quant_method": "awq", "bits": 4}, "moe_wna16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "deepseek_v4_fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt_fp8"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "mxfp8"),
    ],
)
def test_a_name_of_the_checkpoints_own_format_is_taken(
    config: dict[str, Any], asked: Quantization, checkpoint: Checkpoints
) -> None:
    spec = read_spec(checkpoint("llama"), quantization_config=config)
    assert isinstance(choose_scheme(spec, asked), CheckpointFormat)


@pytest.mark.parametrize(("asked", "plain"), [("int4", 2), ("bitsandbytes", 14), ("int8", 0)])
def test_layers_that_stay_plain_are_named(
    asked: Quantization, plain: int, checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two layers, whose down projections have 80 inputs and whose other projections have 32."""
    spec = read_spec(checkpoint("llama", hidden_size=32, num_attention_heads=2, intermediate_size=80))
    context = model_context(spec, quantization=asked)
    with contextlib.closing(context.weights):
        for _ in range(2):  # as a dry build before a real one
            dry_build(spec, context)
    assert isinstance(context.scheme, Online)
    context.scheme.log_unquantized()
    assert caplog.text.count("stay as the checkpoint has them") == (plain > 0)
    assert f"{plain or ''} linear layers" in caplog.text or not plain


@pytest.mark.parametrize("name", ["fp8", "fp8_per_tensor", "fp8_per_block", "mxfp8", "int4", "mxfp4", "bitsandbytes"])
def test_two_ranks_hold_the_numbers_of_one(name: str, checkpoint: Checkpoints) -> None:
    """Also where a rank's inputs end inside a group, and where a layer has no whole groups."""
    spec = read_spec(checkpoint("qwen3", intermediate_size=104))

    def logprobs(group: ParallelGroup) -> Tensor:
        model = load_model(spec, group=group, quantization=name)
        return PagedDriver(model, 1, 80).step({0: PROMPT})[0].log_softmax(-1)

    expected = logprobs(ParallelGroup())
    for got in on_every_rank(2, logprobs):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
