"""Requests on an accelerator give the same outputs as on the CPU. Skipped without one; see `scripts/gpu_check`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams, ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [[(7 * i * n + 3) % 300 + 3 for i in range(5 + 9 * n)] for n in range(1, 12)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=32, ignore_eos=True, logprobs=1),
]


def outputs_on(device: str, folder: Path, **options: object) -> list[tuple[list[int], float]]:
    """(tokens, cumulative log-probability) of every prompt under both kinds of sampling."""
    with LLM(str(folder), device=device, max_model_len=512, num_gpu_blocks_override=512, **options) as llm:
        prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
        outputs = llm.generate(prompts, PARAMS * len(PROMPTS), use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob or 0.0) for output in outputs]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_float32_tokens_are_those_of_the_cpu(checkpoint: Callable[..., Path], family: str) -> None:
    folder = checkpoint(family)
    for (gpu_tokens, gpu_logprob), (cpu_tokens, cpu_logprob) in zip(
        outputs_on("cuda", folder), outputs_on("cpu", folder), strict=True
    ):
        assert gpu_tokens == cpu_tokens
        assert gpu_logprob == pytest.approx(cpu_logprob, abs=1e-2)


def test_bfloat16_runs_in_chunks_and_with_preemption(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3", dtype="bfloat16")
    tight = outputs_on("cuda", folder, max_num_batched_tokens=32, enable_prefix_caching=False)
    assert [len(tokens) for tokens, _ in tight] == [32] * len(tight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bitmask_takes_away_what_it_does_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 1003, generator=generator).to(dtype)
    bitmask = np.random.default_rng(1).integers(-(2**31), 2**31, (3, 32), np.int32)
    rows = np.array([4, 0, 2])
    there = logits.cuda()
    ops.bind("cuda").sampling.apply_bitmask(there, rows, bitmask)
    ops.bind("cpu").sampling.apply_bitmask(logits, rows, bitmask)
    assert torch.equal(there.cpu(), logits)
