"""Groups of inputs whose last one is shorter: each number has its own group's scale, on one rank and on several."""

import re
from pathlib import Path

import pytest
import torch

from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.quantization.groups import equal_groups, find_group
from tests.executor.paged_driver import Checkpoints, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank
from tests.executor.weights.stored_formats import Format, gptq, packed_integers
from tests.executor.weights.test_quantized_checkpoints import FORMATS, LINEAR, logprobs_of, write

torch.set_num_threads(1)

SHORT_SIZES = {"hidden_size": 80, "intermediate_size": 144, "num_attention_heads": 4, "head_dim": 20}
"""Two groups of 32 and one of 16, and four and one; a rank of two has 40 and 72 inputs."""

IN_GROUPS = (
    *("gptq-3", "gptq-4", "gptq-8-zeros", "gptq-zeros", "gptq-order", "awq", "awq-gemv", "quark-int4"),
    *("ct-w3-group", "ct-w4-group", "ct-w4-order", "ct-w8-group", "ct-fp8-group", "ct-int8-group", "fp8-block"),
    *("modelopt-int4-awq", "torchao-int4-in-bytes", "torchao-int6-zeros", "torchao-int4"),
)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", IN_GROUPS)
def test_outputs_are_those_of_the_numbers(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    sizes = SHORT_SIZES | ({"hidden_size": 96, "intermediate_size": 160} if name == "gptq-3" else {})
    form = Format(FORMATS[name].config | {"group_size": 64}, gptq(3, group=64)) if name == "gptq-3" else FORMATS[name]
    packed, plain = write(checkpoint("qwen3", **sizes), tmp_path, form)
    expected, logprobs = logprobs_of(plain)(ParallelGroup()), logprobs_of(packed)
    assert expected.exp().amax() < 0.9, "a model that is sure of one token hides differences"
    for got in (logprobs(ParallelGroup()), *on_every_rank(2, logprobs)):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ["gptq-zeros", "gptq-order", "ct-w4-group", "ct-fp8-group", "awq"])
def test_experts_are_those_of_the_numbers(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("qwen3_moe", hidden_size=80, intermediate_size=144, moe_intermediate_size=80)
    layers = re.compile(r"model\.layers\.\d+\.mlp\.experts\..*proj\.weight")
    packed, plain = write(source, tmp_path, FORMATS[name], layers)
    expected, logprobs = logprobs_of(plain)(ParallelGroup()), logprobs_of(packed)
    for got in (logprobs(ParallelGroup()), *on_every_rank(2, logprobs)):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ["gptq-zeros", "gptq-order", "ct-w8-group", "ct-fp8-group", "awq"])
def test_bytes_are_counted_before_a_weight_is_read(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    packed, _ = write(checkpoint("qwen3", **SHORT_SIZES), tmp_path, FORMATS[name])
    spec = read_spec(packed)
    counted = held_bytes(dry_build(spec, model_context(spec)))
    assert counted == pytest.approx(held_bytes(load_model(spec)), rel=0.001), "but for tables of sixteen values"


def test_layers_may_have_groups_that_the_configuration_does_not_name(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """As where a checkpoint has settings for single layers."""
    form = FORMATS["ct-w4-group"]._replace(write=packed_integers(4, 64))
    packed, plain = write(checkpoint("qwen3", hidden_size=96, intermediate_size=160), tmp_path, form)
    expected = logprobs_of(plain)(ParallelGroup())
    torch.testing.assert_close(logprobs_of(packed)(ParallelGroup()), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("size", "num_groups", "expected", "group"),
    [
        (10944, 86, 128, 128),  # DeepSeek-V2-Lite's down projection
        (10944, 86, None, 128),
        (10944, 86, 64, 128),
        (96, 2, 64, 64),
        (96, 2, 48, 48),
        (96, 2, -1, 64),
        (96, 1, 128, 96),
        (240, 10, None, 24),
        (96, 96, None, 1),
        (240, 11, None, None),
        (96, 0, 32, None),
        (96, 97, None, None),
    ],
)
def test_the_size_of_groups_follows_from_their_number(
    size: int, num_groups: int, expected: int | None, group: int | None
) -> None:
    assert find_group(size, num_groups, expected) == group


def test_a_short_group_keeps_its_number() -> None:
    numbers = torch.arange(6.0).view(2, 3)
    spread = equal_groups(numbers, 80, 32)
    assert spread.shape == (2, 5)
    assert torch.equal(spread.repeat_interleave(16, 1), numbers.repeat_interleave(32, 1)[:, :80])
    assert equal_groups(numbers, 96, 32) is numbers


def test_a_number_of_groups_that_none_explains_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def write_longer(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors, numbers = FORMATS["ct-w4-group"].write(out, size, generator)
        return tensors | {"weight_scale": tensors["weight_scale"][:, :1].repeat(1, 7)}, numbers

    packed, _ = write(checkpoint("qwen3"), tmp_path, FORMATS["ct-w4-group"]._replace(write=write_longer), LINEAR)
    message = r"q_proj.weight_scale of a layer with 64 outputs and 64 inputs is float16 \[64, 7\], where .*groups of 32"
    with pytest.raises(ModelLoadError, match=message):
        load_model(read_spec(packed))
