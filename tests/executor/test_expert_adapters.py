"""Adapters of routed experts, against PEFT's own log-probabilities, as they are and merged into the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.config.parallel import ExpertPlacement
from quire.core.wire.adapters import LoadedAdapter
from quire.core.wire.rank import Layout
from quire.executor.parallel.groups import ParallelGroup
from tests.adapters import load as load_model
from tests.adapters import save_adapter
from tests.executor.step.test_model_runner import prompt_of
from tests.executor.test_peft_adapters import Scorer, load, logprobs_of, start, trained
from tests.executor.thread_group import on_every_rank

PROMPT = prompt_of(3, 24)
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"target_modules": [], "target_parameters": BOTH}),
    "mixtral, one parameter": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": BOTH[1:]}),
    "qwen3": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"], "target_parameters": BOTH}),
    "qwen3, patterns": (
        "qwen3_moe",
        {
            "target_modules": [],
            "target_parameters": BOTH,
            "rank_pattern": {"experts.gate_up_proj": 2},
            "alpha_pattern": {r"model.layers.1.mlp.experts.down_proj": 11},
            "use_rslora": True,
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_have_the_log_probabilities_of_peft(
    checkpoint: Callable[..., Path], variant: str, tmp_path: Path
) -> None:
    family, config = VARIANTS[variant]
    model = trained(checkpoint(family), tmp_path, **config)
    worker = start(checkpoint(family))
    base = worker_scores(worker, adapter=-1)
    assert load(worker, tmp_path) == LoadedAdapter()
    got, wanted = worker_scores(worker), logprobs_of(model, PROMPT)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    assert (base - wanted).abs().max() > 1e-2
    torch.testing.assert_close(worker_scores(worker, adapter=-1), base, atol=1e-6, rtol=0)
    torch.testing.assert_close(got, logprobs_of(model.merge_and_unload(), PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("strategy", [None, "linear", "round_robin"])
def test_two_ranks_have_the_log_probabilities_of_peft(
    checkpoint: Callable[..., Path], strategy: Literal["linear", "round_robin"] | None, tmp_path: Path
) -> None:
    family, config = VARIANTS["qwen3"]
    wanted = logprobs_of(trained(checkpoint(family), tmp_path, **config), PROMPT)
    placement = None if strategy is None else ExpertPlacement(strategy=strategy)

    def job(group: ParallelGroup) -> Tensor:
        worker = start(checkpoint(family), group, layout=Layout(tensor=2), expert_placement=placement)
        assert load(worker, tmp_path) == LoadedAdapter()
        return worker_scores(worker)

    for got in on_every_rank(2, job):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_experts_one_by_one_and_in_stacks_that_share_a_member(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """An adapter whose experts share the A of gates and ups, and the B of the layer after them, in both forms."""
    folder, model = checkpoint("mixtral"), load_model(checkpoint("mixtral"))
    torch.manual_seed(2)
    stacks, separate = {}, {}
    for number, layer in enumerate(model.model.layers):
        experts, name = layer.mlp.experts, f"model.layers.{number}"
        num_experts, double, hidden = experts.gate_up_proj.shape
        size = double // 2
        shapes = {"w1": ((1, 4, hidden), (num_experts, size, 4)), "w3": ((1, 4, hidden), (num_experts, size, 4)),
                  "w2": ((num_experts, 4, size), (1, hidden, 4))}  # fmt: skip
        for part, (a_shape, b_shape) in shapes.items():
            a, b = torch.randn(a_shape) / a_shape[2] ** 0.5, torch.randn(b_shape) / 3
            stacks |= {f"{name}.mlp.experts.{part}.lora_A.weight": a, f"{name}.mlp.experts.{part}.lora_B.weight": b}
            first = size if part == "w3" else 0
            for index in range(num_experts):
                own_a, own_b = (each[index if len(each) > 1 else 0] for each in (a, b))
                expert = f"{name}.block_sparse_moe.experts.{index}.{part}"
                separate |= {f"{expert}.lora_A.weight": own_a.clone(), f"{expert}.lora_B.weight": own_b.clone()}
                to = experts.down_proj if part == "w2" else experts.gate_up_proj[:, first : first + size]
                with torch.no_grad():
                    to[index] += 2 * own_b @ own_a
    wanted, worker = logprobs_of(model, PROMPT), start(folder)
    for kind, tensors in (("stacks", stacks), ("separate", separate)):
        assert load(worker, save_adapter(tmp_path / kind, tensors)) == LoadedAdapter()
        torch.testing.assert_close(worker_scores(worker), wanted, atol=1e-4, rtol=0)
    one_expert = {key: tensor for key, tensor in separate.items() if ".experts.1.w2" in key}
    assert load(worker, save_adapter(tmp_path / "one", one_expert)) == LoadedAdapter()
    assert (worker_scores(worker) - wanted).abs().max() > 1e-2, "what was in the slot before is gone"


def test_what_does_not_fit_is_told_with_the_tensors_name(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    family, config = VARIANTS["mixtral"]
    trained(checkpoint(family), tmp_path, **config)
    worker, path = start(checkpoint(family)), tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if "experts.lora_A" in key)
    save_file({**tensors, key: tensors[key][:, :-1].contiguous()}, path)
    assert f"{key} and {key.replace('lora_A', 'lora_B')} are [" in (load(worker, tmp_path).error or "")
    dora = key.replace("lora_A.weight", "lora_magnitude_vector")
    save_file({**tensors, dora: torch.ones(4)}, path)
    assert f"{dora} is not served for experts" in (load(worker, tmp_path).error or "")


def worker_scores(worker: Any, adapter: int = 1) -> Tensor:
    scorer = Scorer(worker)
    scorer.adapter = adapter
    return scorer.score(PROMPT)
