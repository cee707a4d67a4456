"""Adapters of the projections of latent attention and of recurrent layers, against PEFT's own log-probabilities."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.core.wire.adapters import LoadedAdapter
from quire.core.wire.rank import Layout
from quire.executor.parallel.groups import ParallelGroup
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.step.test_model_runner import prompt_of
from tests.executor.test_peft_adapters import Scorer, load, logprobs_of, start, trained
from tests.executor.thread_group import on_every_rank

PROMPT = prompt_of(3, 24)
TARGETS = {
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "deepseek_v2": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "bamba": ["in_proj", "out_proj"],
    "jamba": ["in_proj", "out_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
}


@pytest.mark.parametrize("family", TARGETS)
def test_prompts_have_the_log_probabilities_of_peft(family: str, tmp_path: Path) -> None:
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    write_checkpoint(folder, family)
    model = trained(folder, adapter, target_modules=TARGETS[family])
    worker = start(folder)
    assert load(worker, adapter) == LoadedAdapter()
    scorer, wanted = Scorer(worker), logprobs_of(model, PROMPT)
    torch.testing.assert_close(scorer.score(PROMPT), wanted, atol=1e-4, rtol=0)
    scorer.adapter = -1
    assert (scorer.score(PROMPT) - wanted).abs().max() > 1e-2


def test_two_ranks_have_their_heads_of_the_expansion_of_latents(tmp_path: Path) -> None:
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    write_checkpoint(folder, "deepseek_v3")
    wanted = logprobs_of(trained(folder, adapter, target_modules=["kv_b_proj"]), PROMPT)

    def job(group: ParallelGroup) -> Tensor:
        worker = start(folder, group, layout=Layout(tensor=2))
        assert load(worker, adapter) == LoadedAdapter()
        return Scorer(worker).score(PROMPT, max_num_batched_tokens=7)

    for got in on_every_rank(2, job):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_the_expansion_of_latents_takes_no_adapter_within_a_sequence(tmp_path: Path) -> None:
    """Attention multiplies its halves with queries and outputs, so with the latents of all earlier tokens."""
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    write_checkpoint(folder, "deepseek_v3")
    trained(folder, adapter, target_modules=["kv_b_proj"], alora_invocation_tokens=[5, 6])
    assert "kv_b_proj, which attention multiplies with all of a sequence" in (load(start(folder), adapter).error or "")
    trained(folder, adapter, target_modules=["kv_b_proj"], use_dora=True)
    assert "kv_b_proj, which takes lora_A and lora_B alone" in (load(start(folder), adapter).error or "")
