"""Adapters of the projections of latent attention and of recurrent layers, against PEFT's own log-probabilities."""

from pathlib import Path

import pytest
import torch

from quire.core.wire.adapters import LoadedAdapter
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.step.test_model_runner import prompt_of
from tests.executor.test_peft_adapters import Scorer, load, logprobs_of, start, trained

PROMPT = prompt_of(3, 24)
TARGETS = {
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    "deepseek_v2": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
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


def test_the_expansion_of_latents_takes_no_adapters(tmp_path: Path) -> None:
    """Attention multiplies its halves with queries and outputs instead of with each latent."""
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    write_checkpoint(folder, "deepseek_v3")
    trained(folder, adapter, target_modules=["o_proj", "kv_b_proj"])
    left_over = load(start(folder), adapter).left_over
    assert len(left_over) == 8
    assert all(".kv_b_proj.lora_" in key for key in left_over)
