"""Drafts beside whatever else a request may ask for: one engine with them, one without, the same outputs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.core.wire.sampling_params import ThinkingMarks
from quire.sampling_params import BeamSearchParams
from tests.adapters import load, random_tensors, save_adapter
from tests.oracle import OUTPUTS
from tests.test_draft_sameness import ALWAYS, BASE_OPTIONS, ORACLE
from tests.test_sameness import LENGTH, prompts

MARKS = ThinkingMarks(begin=[[3]], end=[[21, 22]], opened=True)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "three of a prompt": {"n": 3, "temperature": 1.1, "seed": 3},
    "penalties": {"temperature": 0.9, "seed": 8, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "filters": {"temperature": 1.3, "seed": 5, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    "thinking": {"temperature": 0.9, "seed": 6, "thinking_token_budget": 5, "thinking": MARKS},
    "a bias": {"temperature": 0.8, "seed": 2, "logit_bias": {11: 2.0}, "bad_words_token_ids": [[7], [8, 9]]},
    "a minimum": {"temperature": 0.8, "seed": 4, "min_tokens": 9, "stop_token_ids": [15, 16, 17]},
}


class Kind(NamedTuple):
    """One request: its prompt, what it asks for, and the number of its adapter."""

    prompt: dict[str, list[int]]
    params: SamplingParams
    adapter: int


def kinds() -> list[Kind]:
    """All parameters with the base, the first and the second adapter; each prompt is asked by several."""
    return [
        Kind(prompts()[1 + number % 5], SamplingParams(logprobs=1, **(LENGTH | given)), adapter)
        for adapter in range(3)
        for number, given in enumerate(PARAMS.values())
    ]


def count(llm: LLM, name: str) -> int:
    """The figure of all engines together."""
    return sum(each.value for each in llm.get_metrics() if each.name == f"vllm:spec_decode_num_{name}")


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    base, root = load(model), tmp_path_factory.mktemp("adapters")
    folders = [save_adapter(root / f"a{number}", random_tensors(base, number)) for number in (1, 2)]
    return [None, *(LoRARequest(f"a{number}", number, str(each)) for number, each in enumerate(folders, 1))]


Run = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def run(model: Path, adapters: list[LoRARequest | None]) -> Run:
    """Starts an engine with some options; returns the outputs and the figures of all kinds of requests."""
    options = BASE_OPTIONS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}

    def run(more: dict[str, Any]) -> dict[str, Any]:
        asked = kinds()
        with LLM(str(model), **(options | more)) as llm:
            answers = llm.generate(
                [each.prompt for each in asked],
                [each.params for each in asked],
                use_tqdm=False,
                lora_request=[adapters[each.adapter] for each in asked],
            )
            drafts, accepted = count(llm, "drafts"), count(llm, "accepted_tokens")
            beams = llm.beam_search(prompts()[:3], BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
            return {
                "tokens": [[output.token_ids for output in answer.outputs] for answer in answers],
                "logprobs": [
                    row[token].logprob
                    for answer in answers
                    for output in answer.outputs
                    for row, token in zip(output.logprobs, output.token_ids, strict=True)
                ],
                "beams": [[beam.tokens for beam in each.sequences] for each in beams],
                "drafts": drafts,
                "accepted": accepted,
            }

    return run


@pytest.fixture(scope="module")
def expected(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    found = run({"spec_method": "off"})
    assert found["drafts"] == 0
    path = tmp_path_factory.mktemp("oracle") / "outputs.json"
    known = [
        [kind.prompt["prompt_token_ids"], tokens]
        for kind, answers in zip(kinds(), found["tokens"], strict=True)
        for tokens in answers
    ]
    path.write_text(json.dumps(known))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OUTPUTS, str(path))
        yield found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one-worker"),
        pytest.param({"data_parallel_size": 2, "max_num_batched_tokens": 32}, id="two-engines-in-chunks"),
    ],
)
def test_same_outputs(run: Run, expected: dict[str, Any], options: dict[str, Any]) -> None:
    found = run({"speculative_config": ORACLE | ALWAYS, **options})
    for kind, tokens, others in zip(kinds(), found["tokens"], expected["tokens"], strict=True):
        assert tokens == others, (kind.params, kind.adapter)
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
    assert found["beams"] == expected["beams"]
    assert found["accepted"] > found["drafts"] > 100
