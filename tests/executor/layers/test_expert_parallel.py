"""Experts that are divided over ranks whole, against one rank with all of them."""

import contextlib
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.core.config.parallel import ExpertPlacementStrategy
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import ShapeReader, dry_build, held_bytes
from quire.executor.parallel.expert_placement import Placement
from quire.executor.parallel.groups import ParallelGroup
from tests.executor.layers.test_layers import on_every_rank
from tests.executor.models.test_hybrid_models import Folder
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.models.test_models import prompts
from tests.executor.models.test_moe_models import VARIANTS
from tests.executor.models.test_transformers import universal_spec
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, model_context, read_spec

torch.set_num_threads(1)


def test_places_are_as_equal_as_can_be() -> None:
    assert Placement.of(6, 4, "linear").ranks == ((0, 1), (2, 3), (4,), (5,))
    assert Placement.of(6, 4, "round_robin").ranks == ((0, 4), (1, 5), (2,), (3,))
    assert Placement.of(2, 3, "linear").ranks == ((0,), (1,), ())


def logits(spec: ModelSpec, building: Lock, **options: Any) -> list[Tensor]:
    """Of three prompts, and of a step after them."""
    with building:  # ranks are processes, and do not share Transformers' tables
        model = load_model(spec, **options)
    driver = PagedDriver(model, 3, 80)
    some = dict(enumerate(prompts(3, spec.vocab_size)))
    return [*driver.step(some).values(), *driver.step({0: [3], 1: [4], 2: [9]}).values()]


CASES: list[tuple[str, dict[str, Any], int, ExpertPlacementStrategy]] = [
    ("mixtral", {}, 2, "linear"),
    ("mixtral", {"num_local_experts": 3}, 4, "linear"),  # a rank without any
    ("gpt_oss", {}, 4, "round_robin"),
    ("granite_moe", {}, 4, "linear"),
    ("gemma4", VARIANTS["gemma4"][1], 2, "round_robin"),
    ("qwen2_moe", {"num_local_experts": 9}, 4, "linear"),
    ("llama4", {}, 2, "linear"),
    ("deepseek_v3", {}, 4, "round_robin"),
]


@pytest.mark.parametrize(("family", "options", "size", "strategy"), CASES)
def test_ranks_together_are_the_whole_model(
    family: Any, options: dict[str, Any], size: int, strategy: ExpertPlacementStrategy, checkpoint: Checkpoints
) -> None:
    spec, building = read_spec(checkpoint(family, **options)), Lock()
    whole = logits(spec, building)
    for got in on_every_rank(size, lambda group: logits(spec, building, group=group, experts=strategy)):
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


def test_hybrid_models_and_a_latent_space_of_experts(hybrid: Folder) -> None:  # noqa: F811
    spec, building = read_spec(hybrid("nemotron-h-experts")), Lock()
    whole = logits(spec, building)
    for got in on_every_rank(2, lambda group: logits(spec, building, group=group, experts="linear")):
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


def test_experts_of_few_bits(checkpoint: Checkpoints) -> None:
    spec, building = read_spec(checkpoint("mixtral")), Lock()
    whole = logits(spec, building, quantization="int4")
    for got in on_every_rank(
        2, lambda group: logits(spec, building, group=group, experts="round_robin", quantization="int4")
    ):
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


def test_classes_of_transformers(checkpoint: Checkpoints) -> None:
    spec, building = universal_spec(checkpoint("qwen3_moe")), Lock()
    whole = logits(spec, building)
    for got in on_every_rank(2, lambda group: logits(spec, building, group=group, experts="linear")):
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_rank_reads_only_its_own_experts(family: Any, checkpoint: Checkpoints) -> None:
    """And what it will hold is counted before."""
    spec = read_spec(checkpoint(family))
    read = []
    for rank in range(4):
        context = model_context(spec, group=ParallelGroup(rank, 4), experts="linear")
        with contextlib.closing(context.weights), torch.inference_mode():
            reader = ShapeReader(torch.float32)
            counted = held_bytes(dry_build(spec, context, reader))
        read.append({(each.name, each.shard) for each in reader.reads if "experts" in each.name})
        assert counted == held_bytes(load_model(spec, group=context.group, experts="linear"))
    num_reads = len(set.union(*read))
    assert num_reads == sum(map(len, read))
    assert max(map(len, read)) <= 0.4 * num_reads


def test_a_model_without_experts_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelLoadError, match=r"no experts that could be divided.*without --enable-expert-parallel"):
        load_model(read_spec(checkpoint("llama")), group=ParallelGroup(0, 2), experts="linear")


def test_tokens_are_those_of_one_worker(checkpoint: Checkpoints) -> None:
    """Six experts on four workers."""
    options = {"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 64}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    some = [{"prompt_token_ids": list(range(start, start + 20))} for start in (5, 40, 80)]
    outputs = []
    for parallel in ({}, {"tensor_parallel_size": 4, "enable_expert_parallel": True}):
        with LLM(str(checkpoint("gpt_oss")), **options, **parallel) as llm:
            outputs.append([output.outputs[0].token_ids for output in llm.generate(some, params, use_tqdm=False)])
    assert outputs[0] == outputs[1]
