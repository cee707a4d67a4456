"""Experts in MXFP4: each code and scale, against Transformers, and a model that has them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.core.config.load import LoadConfig
from quire.core.config.quantization import Quantization
from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import held_bytes
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.quantization import log_once
from quire.executor.weights.quantization.four_bit_floats import mxfp4
from quire.ops.quantized import dequantize
from tests.executor.memory.test_dry_build import dry_model
from tests.executor.models.test_models import expected_logprobs
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, read_spec
from tests.executor.thread_group import on_every_rank
from tests.executor.weights.test_per_layer import asked

torch.set_num_threads(1)

PROMPT = list(range(5, 69))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_transformers(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(2).view(2, 4, 4, 16)
    scales = torch.randint(100, 140, (2, 4, 4), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    for expert in range(2):
        weight = mxfp4(blocks[expert].flatten(1), scales[expert])
        assert torch.equal(dequantize(weight, dtype), expected[expert].t())


def test_a_scale_of_255_is_no_number() -> None:
    scales = torch.tensor([[255, 0]], dtype=torch.uint8)
    numbers = dequantize(mxfp4(torch.ones(1, 32, dtype=torch.uint8), scales))[0]
    assert numbers[:32].isnan().all()
    assert numbers[32:].isfinite().all()


@pytest.fixture(scope="module")
def folders(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with experts in MXFP4, and one with the same numbers."""
    root = tmp_path_factory.mktemp("mxfp4")
    packed, plain = root / "packed", root / "plain"
    for folder in (packed, plain):
        shutil.copytree(checkpoint("gpt_oss", sliding_window=12), folder)
    tensors = load_file(packed / "model.safetensors")
    numbers = dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        shape = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def test_outputs_are_those_of_the_numbers(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    expected = expected_logprobs(plain, PROMPT)

    def logprobs(group: ParallelGroup) -> torch.Tensor:
        driver = PagedDriver(load_model(read_spec(packed), group=group), 1, 80)
        return driver.step({0: PROMPT})[0].log_softmax(-1)

    for got in (logprobs(ParallelGroup()), *on_every_rank(2, logprobs)):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_bytes_are_counted_and_dummies_are_numbers(folders: tuple[Path, Path]) -> None:
    spec = read_spec(folders[0], dtype="bfloat16")
    model = load_model(spec, load=LoadConfig(load_format="dummy"))
    assert held_bytes(dry_model(spec)) == held_bytes(model)
    logits = PagedDriver(model, 1, 80, dtype=torch.bfloat16).step({0: PROMPT})[0]
    assert logits.isfinite().all()


def test_sizes_that_are_no_blocks_are_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ModelLoadError, match="down_proj: 100 inputs are no multiple of 32"):
        load_model(read_spec(folders[0], intermediate_size=100), load=LoadConfig(load_format="dummy"))


@pytest.mark.parametrize("gates", [{"swiglu_limit": 0.02}, {"swiglu_alpha": 1.2}])
def test_other_gates_are_computed_by_the_class_of_transformers(
    gates: dict[str, float], checkpoint: Checkpoints, folders: tuple[Path, Path]
) -> None:
    """That of Transformers has no experts in MXFP4."""
    folder = checkpoint("gpt_oss", **gates)
    got = PagedDriver(load_model(read_spec(folder)), 1, 80).step({0: PROMPT})[0].log_softmax(-1)
    torch.testing.assert_close(got, expected_logprobs(folder, PROMPT), atol=2e-4, rtol=0)
    with pytest.raises(ModelLoadError, match=r"swiglu_\w+ [\d.]+ is not supported in GptOssForCausalLM; only "):
        load_model(replace(read_spec(folder), implementation="quire"))
    with pytest.raises(
        ModelLoadError, match=r"swiglu_\w+ [\d.]+ is not supported with experts that are quantized; only "
    ):
        load_model(read_spec(folders[0], **gates))


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        (None, False),
        ("int8", True),
        (asked(None, linear="int8"), True),
        (asked("int8", ignore=["experts"]), True),
        (asked(None, linear="int8", moe="mxfp4"), True),
        (asked(None, moe="mxfp4"), False),
        (asked(None, targets={"experts": "mxfp4"}), False),
        (asked(None, targets={"experts": "mxfp4", "o_proj": "int8"}), True),
    ],
)
def test_experts_stay_and_the_log_says_so(
    quantization: Quantization | None, says: bool, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    log_once._log.cache_clear()  # another test may have heard it
    caplog.set_level("INFO")
    load_model(read_spec(folders[0]), quantization=quantization)
    said = [record.getMessage() for record in caplog.records if "experts" in record.getMessage()]
    assert [each.partition(",")[0] for each in said] == ["experts stay in MXFP4"] * says


@pytest.mark.parametrize(
    "config",
    [{"moe": "int8"}, {"linear": "fp8", "moe": "int4"}, {"targets": {"experts": "int8"}}, {"targets": {"*": "fp8"}}],
)
def test_another_format_of_these_experts_is_refused(config: dict[str, Any], folders: tuple[Path, Path]) -> None:
    with pytest.raises(ModelLoadError, match=r"another format of model\.layers\.0\.mlp\.experts, .* MXFP4"):
        load_model(read_spec(folders[0]), quantization=asked(None, **config))
