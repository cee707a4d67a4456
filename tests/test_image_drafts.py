"""Rejected drafts beside images: recurrent layers compute accepted tokens again, at their right places."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.image_checkpoints import make_image, write_checkpoint

pytestmark = [pytest.mark.turns(4, among="whole systems"), pytest.mark.timeout(480)]  # it starts two engines

GUESSES = {"method": "custom_class", "model": "tests.oracle.Guesser", "num_speculative_tokens": 2}


def test_same_tokens_after_rejected_drafts_beside_an_image(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3_5")
    prompt: dict[str, Any] = {
        "prompt": "a <|vision_start|><|image_pad|><|vision_end|> of what",
        "multi_modal_data": {"image": make_image(96, 64)},
    }
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)

    def run(**options: Any) -> tuple[Any, float, float]:
        with LLM(
            str(folder), dtype="float32", max_model_len=512, num_gpu_blocks_override=64, disable_log_stats=False,
            **options,
        ) as llm:  # fmt: skip
            [output] = llm.generate(prompt, params, use_tqdm=False)
            metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
            made, right = (metrics[f"vllm:spec_decode_num_{name}"] for name in ("draft_tokens", "accepted_tokens"))
            return output.outputs[0], made, right

    expected, _, _ = run()
    got, made, right = run(speculative_config={**GUESSES, "enable_adaptive_verification": False})
    assert made > right
    assert got.token_ids == expected.token_ids
    assert abs(got.cumulative_logprob - expected.cumulative_logprob) < 1e-3
