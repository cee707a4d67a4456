"""Requests on an accelerator give the same outputs as on the CPU. Skipped without one; see `scripts/gpu_check`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams, ops
from quire.core.wire.structured_outputs import StructuredOutputsParams
from tests.checkpoints import VOCAB_SIZE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [[(7 * i * n + 3) % 300 + 3 for i in range(5 + 9 * n)] for n in range(1, 12)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=32, ignore_eos=True, logprobs=1),
]
LENGTHS: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 512}


def outputs_on(device: str, folder: Path, **options: object) -> list[tuple[list[int], float]]:
    """(tokens, cumulative log-probability) of every prompt under both kinds of sampling."""
    with LLM(str(folder), device=device, **LENGTHS, **options) as llm:
        prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
        outputs = llm.generate(prompts, PARAMS * len(PROMPTS), use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob or 0.0) for output in outputs]


def scores_on(device: str, folder: Path, **options: object) -> torch.Tensor:
    """The log-probability of each prompt's tokens but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), device=device, **LENGTHS, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    scores = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, logprobs in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert logprobs is not None
            scores.append(logprobs[token].logprob)
    return torch.tensor(scores)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma3n", "gpt_oss", "deepseek_v3", "qwen3_moe"]
)
def test_float32_tokens_are_those_of_the_cpu(checkpoint: Callable[..., Path], family: str) -> None:
    folder = checkpoint(family)
    for (gpu_tokens, gpu_logprob), (cpu_tokens, cpu_logprob) in zip(
        outputs_on("cuda", folder), outputs_on("cpu", folder), strict=True
    ):
        assert gpu_tokens == cpu_tokens
        assert gpu_logprob == pytest.approx(cpu_logprob, abs=1e-2)


@pytest.mark.parametrize("implementation", ["quire", "transformers"])
def test_float32_scores_are_those_of_the_cpu(checkpoint: Callable[..., Path], implementation: str) -> None:
    folder = checkpoint("qwen3")
    gpu, cpu = (scores_on(device, folder, model_impl=implementation) for device in ("cuda", "cpu"))
    torch.testing.assert_close(gpu, cpu, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_in_chunks_and_with_preemption(checkpoint: Callable[..., Path], dtype: str) -> None:
    folder = checkpoint("qwen3", dtype=dtype)
    tight = outputs_on("cuda", folder, max_num_batched_tokens=32, enable_prefix_caching=False)
    assert [len(tokens) for tokens, _ in tight] == [32] * len(tight)
    torch.testing.assert_close(scores_on("cuda", folder), scores_on("cpu", folder), atol=0.25, rtol=0)


@pytest.mark.parametrize("codes", ["fp8", "fp8_e5m2", "int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_caches_of_codes_hold_what_those_of_the_cpu_hold(
    checkpoint: Callable[..., Path], family: str, codes: str
) -> None:
    folder = checkpoint(family)
    gpu, cpu = (scores_on(device, folder, kv_cache_dtype=codes) for device in ("cuda", "cpu"))
    assert (gpu - cpu).abs().mean() < 1e-2, "a rounding may fall the other way, but seldom"


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_block", "mxfp8", "int8", "int4", "mxfp4", "bitsandbytes"])
def test_weights_become_the_codes_that_they_become_on_the_cpu(
    checkpoint: Callable[..., Path], quantization: str
) -> None:
    """On the CPU, activations are rounded, too."""
    folder = checkpoint("qwen3_moe")
    gpu, cpu = (scores_on(device, folder, quantization=quantization) for device in ("cuda", "cpu"))
    plain = scores_on("cuda", folder)
    assert (gpu - plain).abs().mean() > 0, "weights of few bits change the scores"
    assert (gpu - cpu).abs().mean() < max(0.1 * (gpu - plain).abs().mean().item(), 1e-2)


def test_a_grammar_holds(checkpoint: Callable[..., Path]) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    params = [
        SamplingParams(
            temperature=1, seed=seed, max_tokens=60,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        )
        for seed in range(8)
    ]  # fmt: skip
    with LLM(str(checkpoint("llama")), device="cuda", **LENGTHS) as llm:
        outputs = llm.generate(["The answer is "] * len(params), params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert texts, "at least one of eight seeds closes its braces"
    assert all(isinstance(json.loads(text)["a"], int) for text in texts)


def test_tokens_out_of_the_vocabulary_disturb_nobody(checkpoint: Callable[..., Path]) -> None:
    """An index past an embedding's end would end every process on the device."""
    with LLM(str(checkpoint("qwen3")), device="cuda", **LENGTHS) as llm:
        with pytest.raises(ValueError, match=f"Token id {VOCAB_SIZE + 5} in the prompt is outside"):
            llm.generate([[VOCAB_SIZE + 5]], PARAMS[0], use_tqdm=False)
        assert len(llm.generate(PROMPTS[:1], PARAMS[0], use_tqdm=False)[0].outputs[0].token_ids) == 32


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
