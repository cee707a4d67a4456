"""A request's tokens are those that it has without drafts, whatever makes the drafts and however the engine runs."""

import importlib.resources
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams
from tests.oracle import OUTPUTS
from tests.test_sameness import BASE_OPTIONS as PLAIN_OPTIONS
from tests.test_sameness import params, prompts

pytestmark = pytest.mark.turns(4, among="whole systems")

ORACLE = {"method": "custom_class", "model": "tests.oracle.Oracle", "num_speculative_tokens": 4}
BASE_OPTIONS = PLAIN_OPTIONS | {"disable_log_stats": False}
ALWAYS = {"enable_adaptive_verification": False}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("qwen3"))


@pytest.fixture(scope="module")
def expected(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[int]]]:
    with LLM(model, **BASE_OPTIONS) as llm:
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts(), params(), use_tqdm=False)]
    path = tmp_path_factory.mktemp("oracle") / "outputs.json"
    known = [[prompt["prompt_token_ids"], tokens] for prompt, tokens in zip(prompts(), outputs, strict=True)]
    path.write_text(json.dumps(known))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OUTPUTS, str(path))
        yield outputs


def count(llm: LLM, name: str) -> Any:
    [found] = [metric for metric in llm.get_metrics() if metric.name == f"vllm:spec_decode_num_{name}"]
    return found


@pytest.mark.parametrize(
    ("speculation", "options"),
    [
        pytest.param(ORACLE | ALWAYS, {}, id="always"),
        pytest.param(ORACLE, {}, id="adaptive"),
        pytest.param(ORACLE | ALWAYS, {"num_gpu_blocks_override": 40, "enable_prefix_caching": False}, id="preempted"),
        pytest.param(
            ORACLE | ALWAYS, {"tensor_parallel_size": 2, "max_num_batched_tokens": 16}, id="tensor-parallel-2-in-chunks"
        ),
        pytest.param(
            ORACLE | ALWAYS, {"pipeline_parallel_size": 2, "num_gpu_blocks_override": 40}, id="two-stages-preempted"
        ),
    ],
)
def test_same_tokens_with_an_oracle(
    model: str, expected: list[list[int]], speculation: dict[str, Any], options: dict[str, Any]
) -> None:
    with LLM(model, speculative_config=speculation, **(BASE_OPTIONS | options)) as llm:
        outputs = llm.generate(prompts(), params(), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        drafts, accepted = count(llm, "drafts").value, count(llm, "accepted_tokens").value
        places = count(llm, "accepted_tokens_per_pos").values
    assert sum(places) == accepted
    if "enable_adaptive_verification" in speculation:
        print("SEEN", accepted, drafts, places)
        assert accepted > 1.5 * drafts > 0  # of up to four
        assert len(places) == 4
        assert places == sorted(places, reverse=True)
    if "num_gpu_blocks_override" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_same_tokens_with_lookups(model: str, expected: list[list[int]], method: str) -> None:
    speculation = {"method": method, "prompt_lookup_min": 1, **ALWAYS}
    with LLM(model, speculative_config=speculation, **BASE_OPTIONS) as llm:
        for _ in range(2):  # the second time, finished answers are those that come
            outputs = llm.generate(prompts(), params(), use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        drafts, accepted = count(llm, "draft_tokens").value, count(llm, "accepted_tokens").value
    assert drafts > 0
    if method == "suffix":
        assert accepted > 200


def test_same_tokens_with_a_draft_model_of_another_vocabulary(model: str, expected: list[list[int]]) -> None:
    demo = str(importlib.resources.files("quire") / "demo_model")
    speculation = {"model": demo, "use_heterogeneous_vocab": True, **ALWAYS}
    with LLM(model, speculative_config=speculation, **BASE_OPTIONS) as llm:
        outputs = llm.generate(prompts(), params(), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert count(llm, "draft_tokens").value > 100


SCHEMA = {
    "type": "object",
    "properties": {f"measured_value_{name}": {"type": "integer"} for name in ("one", "two", "three")},
    "required": [f"measured_value_{name}" for name in ("one", "two", "three")],
    "additionalProperties": False,
}


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_same_tokens_with_the_forced_pieces_of_a_schema(model: str, backend: str) -> None:
    options = BASE_OPTIONS | {
        "structured_outputs_config": {"backend": backend, "disable_any_whitespace": True},
        "model": model,
    }
    kinds = [
        SamplingParams(
            temperature=temperature,
            seed=7,
            max_tokens=120,
            structured_outputs=StructuredOutputsParams(json=SCHEMA),
            logprobs=2,
        )
        for temperature in (0, 0.7, 1.3)
    ]
    with LLM(**options, spec_method="off") as llm:
        plain = [llm.generate(prompts()[:4], kind, use_tqdm=False) for kind in kinds]
        assert count(llm, "drafts").value == 0
    with LLM(**options, speculative_config=ALWAYS) as llm:
        forced = [llm.generate(prompts()[:4], kind, use_tqdm=False) for kind in kinds]
        drafts, accepted = count(llm, "drafts").value, count(llm, "accepted_tokens").value
    for before, after in zip(plain, forced, strict=True):
        assert [each.outputs[0].token_ids for each in after] == [each.outputs[0].token_ids for each in before]
        for one, other in zip(before, after, strict=True):
            values = [
                [
                    row[token].logprob
                    for row, token in zip(each.outputs[0].logprobs, each.outputs[0].token_ids, strict=True)
                ]
                for each in (one, other)
            ]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert drafts > 0
    assert accepted > 2 * drafts
