"""Plans of loading a model, against workers that load it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.inspection import LoadPlan
from quire.core.wire.protocol import WorkerReady
from quire.executor.inspection.load_plan import plan_load
from quire.executor.worker import Worker
from tests.checkpoints import make_checkpoint
from tests.executor.inspection.starts import config_of
from tests.executor.models.test_hybrid_models import COMMON, VARIANTS
from tests.executor.paged_driver import Checkpoints
from tests.executor.step.sequence_ranks import groups_of

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}


def load(config: EngineConfig) -> list[WorkerReady]:
    """What each rank finds when it loads the model; the ranks are threads of this process."""
    layout = config.layout
    tensor, context = groups_of(layout)
    ranks = enumerate(layout.ranks())
    workers = [Worker(config, rank, tensor[number], context_group=context[number]) for number, rank in ranks]
    with ThreadPoolExecutor(layout.num_workers) as pool:
        return list(pool.map(Worker.load, workers))


def check_against_workers(config: EngineConfig) -> LoadPlan:
    plan, ready = plan_load(config, None), load(config)
    assert plan.obstacle is None
    assert plan.num_pages == min(each.num_pages for each in ready)
    assert plan.max_model_len == ready[0].max_model_len
    assert plan.kv_groups == ready[0].kv_groups
    for rank, worker in zip(plan.ranks, ready, strict=True):
        assert rank.weights_bytes == worker.weights_bytes
        assert rank.page_bytes * worker.num_pages == worker.kv_cache_bytes
    return plan


@pytest.mark.parametrize(
    ("family", "options", "sizes"),
    [
        ("llama", {}, {}),
        ("gemma3", {"tensor_parallel_size": 2}, {"sliding_window": 16, "num_hidden_layers": 7}),
        ("youtu", {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 20}, {}),
        ("mixtral", {"max_model_len": -1, "kv_cache_memory_bytes": 100_000}, {}),
        ("mixtral", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, {}),
        ("qwen3", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, {"num_key_value_heads": 1}),
        ("qwen3", {"prefill_context_parallel_size": 2}, {}),
        (
            "youtu",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "prefill_context_parallel_size": 2},
            {},
        ),
        ("qwen3", {"model_impl": "transformers"}, {}),
        ("qwen3", {"enable_lora": True, "max_loras": 3, "tensor_parallel_size": 2}, {}),
    ],
)
def test_the_figures_are_those_of_the_workers(
    family: Any, options: dict[str, Any], sizes: dict[str, Any], checkpoint: Checkpoints
) -> None:
    plan = check_against_workers(config_of(checkpoint(family, **sizes), **{**SIZES, **options}))
    assert plan.is_native == ("model_impl" not in options)


@pytest.mark.parametrize("size", [1, 2])
def test_a_draft_model_counts_with_its_weights_and_its_cache(size: int, checkpoint: Checkpoints) -> None:
    folder, sizes = checkpoint("llama"), {**SIZES, "tensor_parallel_size": size}
    config = config_of(folder, spec_model=str(checkpoint("gemma2")), **sizes)
    plan, alone = check_against_workers(config), plan_load(config_of(folder, **sizes), None)
    for rank, other in zip(plan.ranks, alone.ranks, strict=True):
        assert rank.weights_bytes > other.weights_bytes
    assert sum(len(group.layers) for group in plan.kv_groups) > sum(len(group.layers) for group in alone.kv_groups)


@pytest.mark.parametrize(("variant", "size"), [("lfm2", 1), ("mamba2", 2), ("bamba", 2)])
def test_models_with_states(variant: str, size: int, tmp_path: Path) -> None:
    kind, architecture, config = VARIANTS[variant]
    kind(**{**COMMON, **config, "architectures": [architecture]}).save_pretrained(tmp_path)
    plan = check_against_workers(config_of(tmp_path, load_format="dummy", tensor_parallel_size=size, **SIZES))
    [states] = [group for group in plan.kv_groups if group.is_recurrent]
    assert [rank.state_bytes for rank in plan.ranks] == [states.state_bytes] * size


@pytest.mark.parametrize("tie", [False, True])
def test_parameters_are_those_of_the_checkpoint(tie: bool, checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama", tie=tie)
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    for size in (1, 2):
        assert plan_load(config_of(folder, tensor_parallel_size=size), None).num_parameters == stored


def test_no_weights_are_needed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    assert plan_load(config_of(folder), None).num_parameters > 0


def test_a_classifier_that_is_not_there_is_told(checkpoint: Checkpoints) -> None:
    """config.json's labels alone make no classes."""
    config = config_of(checkpoint("llama"), convert="classify")
    assert config.pooling is not None
    with pytest.raises(ModelLoadError, match="has no classifier: neither score, classifier nor v_head"):
        plan_load(config, None)
