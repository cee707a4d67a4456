"""Classes of Transformers with Quire's parts, served by real processes: the library's tokens, whatever happens beside.

Other tests of such models run them in the test's own process (tests/executor/models/transformers/).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from tests.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.executor.models.tiny_models import Reference, write_checkpoint

pytestmark = pytest.mark.turns(4, among="whole systems")

torch.set_num_threads(1)

PROMPTS = [[(31 * row + 17 * i * i + i) % (VOCAB_SIZE - 3) + 3 for i in range(8 + 13 * row)] for row in range(8)]
"""Of 8 to 99 tokens."""

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS = {"model_impl": "transformers", "dtype": "float32", "max_model_len": 160, "num_gpu_blocks_override": 512}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("dots1", {}), id="experts"),
        pytest.param(("lfm2_moe", {"mamba_block_size": 16}), id="row-by-row-with-states"),
    ],
)
def options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model_type, own = request.param
    folder = tmp_path_factory.mktemp("any-class") / model_type
    write_checkpoint(folder, model_type)
    make_tokenizer().save_pretrained(folder)
    return {"model": str(folder), **OPTIONS, **own}


@pytest.fixture(scope="module")
def together(options: dict[str, Any]) -> Iterator[tuple[LLM, list[list[int]]]]:
    """An engine and the tokens of its first pass: all requests together, nothing cached."""
    with LLM(**options) as llm:
        yield llm, tokens_of(generate(llm, PROMPTS))


def generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_are_those_of_transformers(options: dict[str, Any], together: tuple[LLM, list[list[int]]]) -> None:
    reference = Reference(Path(options["model"]))
    for prompt, output in zip(PROMPTS, together[1], strict=True):
        likeliest = reference.logprobs(prompt + output)[len(prompt) - 1 : -1].argmax(dim=-1)
        assert output == likeliest.tolist()
        assert len(set(output)) > 8, "a degenerate output proves little"


def test_after_a_prefix_and_alone(together: tuple[LLM, list[list[int]]]) -> None:
    llm, expected = together
    again = generate(llm, PROMPTS)
    assert sum(output.num_cached_tokens or 0 for output in again) > 300
    assert tokens_of(again) == expected
    llm.reset_prefix_cache()
    assert tokens_of(generate(llm, PROMPTS[5:6])) == expected[5:6]


def test_in_chunks_and_preempted(options: dict[str, Any], together: tuple[LLM, list[list[int]]]) -> None:
    """Experts on two ranks, too; a class that runs row by row takes too long there."""
    num_ranks = 1 if "mamba_block_size" in options else 2
    tight = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 12, "tensor_parallel_size": num_ranks}
    with LLM(**options | tight) as llm:
        outputs = generate(llm, PROMPTS)
    assert tokens_of(outputs) == together[1]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
