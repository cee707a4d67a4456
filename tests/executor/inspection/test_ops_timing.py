"""What `quire bench ops` times: every operation in every format, with the work that it counts."""

import os

import pytest
import torch

from quire.core.errors import ConfigError
from quire.core.wire.inspection import LayerShape, OpsQuestion
from quire.executor.inspection import ops_cases, weight_formats
from quire.executor.inspection.ops_timing import time_ops
from quire.executor.weights.quantization.formats.gguf_blocks import FORMATS, unpack, with_short_scales
from quire.ops import bind
from quire.ops.cpu.libraries import load_kernels
from quire.ops.cpu.peak_rates import Floors
from quire.ops.quantized import QuantizedWeight
from tests.gguf_files import random_blocks

SMALL = LayerShape(
    hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=4, top_k=2,
    expert_hidden_size=64, expert_size=32, context=20, latent_rank=32, latent_rotary_dim=8,
    window=8, rate=2, index_heads=2, index_head_dim=16, index_top_k=3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings mean nothing here."""
    monkeypatch.setattr(ops_cases, "BEYOND_CACHES", 1)


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> Floors:
    if load_kernels() is None:
        pytest.skip("there are no kernels")
    return Floors()


@pytest.mark.parametrize("name", weight_formats.FORMATS)
def test_each_format_has_its_bits(name: str) -> None:
    weight = weight_formats.FORMATS[name](8, 64)
    assert tuple(weight.shape) == (8, 64)
    of_codes = {
        "int8": 8,
        **dict.fromkeys(("fp8", "fp8_e5m2", "fp8_block", "mxfp8"), 8),
        "q8_0": 8,
        "q6_k": 8,
        "q5_k": 8,
        **dict.fromkeys(("int4", "int4_g64", "int4_g128", "int4_zero", "nf4", "fp4", "nvfp4"), 4),
        "q4_k": 4,
        "q3_k": 4,
        "q2_k": 4,
    }
    bits = {"bf16": 16, "fp16": 16, "fp32": 32, **of_codes}[name]
    numbers = weight.codes if isinstance(weight, QuantizedWeight) else weight
    assert numbers.nbytes == 8 * 64 * bits // 8


@pytest.mark.parametrize(
    ("name", "group_size", "has_offsets"),
    [
        *(("fp8_e5m2", 512, False), ("fp8_block", 128, False), ("mxfp8", 32, False), ("int4_g64", 64, False)),
        *(("int4_g128", 128, False), ("int4_zero", 128, True), ("nf4", 64, False), ("nvfp4", 16, False)),
    ],
)
def test_each_format_has_its_groups_and_floors(name: str, group_size: int, has_offsets: bool, floors: Floors) -> None:
    weight = weight_formats.FORMATS[name](8, 512)
    assert isinstance(weight, QuantizedWeight)
    assert (weight.group_size, weight.offsets is not None) == (group_size, has_offsets)
    timed = time_ops(OpsQuestion(SMALL, ["linear", "experts"], [name], [1], 0.0))
    assert [timing.operation for timing in timed.timings] == ["linear", "experts"]
    kind = "int4" if name.startswith("int4") else "bfloat16"
    for timing in timed.timings:
        assert timing.read_s == pytest.approx(timing.num_bytes / timed.bytes_per_second)
        assert timing.multiply_s == pytest.approx(timing.num_operations / timed.operations_per_second[kind])


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"])
def test_formats_of_gguf_files_are_made_as_files_are_kept(kind: str) -> None:
    raw = torch.from_numpy(random_blocks((8, 512), kind, 0.01))
    kept = with_short_scales(unpack(raw, FORMATS[kind], 512), "layer")
    made = weight_formats.FORMATS[kind.lower()](8, 512)
    assert isinstance(made, QuantizedWeight)
    for one, other in zip(made, kept, strict=True):
        if isinstance(one, torch.Tensor):
            assert isinstance(other, torch.Tensor)
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
        else:
            assert one == other


def test_the_work_of_each_operation(floors: Floors) -> None:
    question = OpsQuestion(SMALL, list(ops_cases.MAKERS), ["fp32", "int4", "q4_k", "q6_k"], [1, 3], 0.0)
    timed = time_ops(question)
    work = {(each.operation, each.dtype, each.rows): each for each in timed.timings}
    numbers = (4 + 2 * 2) * 16 * 64 + 64 * 64 + 2 * 96 * 64 + 64 * 96  # of the four linear layers
    assert work["linear", "fp32", 1].num_bytes == 4 * numbers
    assert work["linear", "fp32", 3].num_operations == 2 * 3 * numbers
    assert work["linear", "int4", 1].num_bytes == numbers // 2 + numbers // 32 * 2 + 4 * 16 * 4  # scales and tables
    with_starts = numbers // 2 + numbers // 32 * 4 + 4 * 16 * 4
    assert work["linear", "q4_k", 1].num_bytes == with_starts
    assert work["linear", "q6_k", 1].num_bytes == numbers + numbers // 16 * 2
    assert ("attention", "q4_k", 1) not in work
    assert work["attention", "fp32", 3].num_bytes == 3 * 20 * 2 * 2 * 16 * 4
    assert work["attention", "fp32", 3].num_operations == 4 * 3 * 20 * 4 * 16
    assert work["prefill", "fp32", 3].num_operations == 4 * (1 + 2 + 3) * 4 * 16
    assert ("prefill", "fp32", 1) not in work
    assert work["attention", "int4", 1].num_bytes == 20 * 2 * 2 * (16 // 2 + 4), "codes, and a scale of each head"
    assert work["latent", "fp32", 3].num_bytes == (3 * 20 * (32 + 8) + 2 * 4 * 16 * 32) * 4
    assert work["latent", "fp32", 3].num_operations == 2 * 3 * 4 * (2 * 16 * 32 + 20 * (32 + 8 + 32))
    in_codes = 20 * (32 // 2 + 4 + 8 // 2 + 4)
    assert work["latent", "int4", 1].num_bytes == in_codes + 2 * 4 * 16 * 32 * 2, "codes with two scales, and weights"
    assert ("latent", "q4_k", 1) not in work
    assert work["compressed", "fp32", 3].num_bytes == 3 * (10 * 16 + (8 + 3) * 32) * 4, "keys, window and chosen rows"
    assert work["compressed", "fp32", 3].num_operations == 2 * 3 * (10 * 2 * 16 + 2 * 4 * 32 * (8 + 3))
    assert work["compressed", "int4", 1].num_bytes == 10 * (16 // 2 + 4) + (8 + 3) * (32 // 2 + 4)
    assert work["experts", "fp32", 1].num_bytes == 2 * 3 * 32 * 64 * 4, "two of the four are read"
    assert work["experts", "fp32", 1].num_operations == 2 * 2 * 3 * 32 * 64
    assert timed.isa == (os.environ.get("QUIRE_CPU_ISA") or timed.available[0])
    for each in timed.timings:
        assert each.read_s == pytest.approx(each.num_bytes / timed.bytes_per_second)
        is_linear = each.operation in ("linear", "experts")
        of_codes = "int8" if each.dtype == "q6_k" else "int4"
        exact = "float32" if each.dtype == "fp32" else of_codes if is_linear else "bfloat16"
        assert each.multiply_s == pytest.approx(each.num_operations / timed.operations_per_second[exact])
        assert each.best_s > 0


def test_a_name_that_is_wrong() -> None:
    for operations, dtypes, says in [
        (["lineal"], ["bf16"], "--ops .*lineal"),
        (["linear"], ["bf17"], "--dtypes .*bf17"),
    ]:
        with pytest.raises(ConfigError, match=says):
            next(ops_cases.cases(bind("cpu"), OpsQuestion(SMALL, operations, dtypes, [1], 0.0)))


def test_the_processor_reads_and_multiplies(floors: Floors) -> None:
    assert floors.read() > 1e6
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.uint8):
        assert floors.multiply(dtype) > 1e6
