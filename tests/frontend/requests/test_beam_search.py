"""Beam search on a real engine, against a plain one over transformers' log-probabilities."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire import LLM, BeamSearchParams, StructuredOutputsParams
from quire.core.errors import ParameterError
from tests.checkpoints import EOS_TOKEN_ID
from tests.executor.models.tiny_models import write_checkpoint

PROMPTS = [[40, 41, 42], [30 + 11 * i % 250 for i in range(40)]]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("llama"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, max_model_len=128, num_gpu_blocks_override=256, max_logprobs=1, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def search(
    reference: PreTrainedModel, prompt: list[int], width: int, length: int, penalty: float, ends: set[int]
) -> list[tuple[list[int], float]]:
    """(tokens without the end, sum of log-probabilities) of the best outputs by definition: every length is reached."""
    running, complete = [([], 0.0)], []
    for _ in range(length):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens for tokens, _ in running])).logits[:, -1]
        candidates = []
        for (tokens, total), row in zip(running, logits.log_softmax(-1), strict=True):
            values, ids = row.topk(max(2 * width, width + len(ends)))
            for value, token_id in zip(values.tolist(), ids.tolist(), strict=True):
                if token_id in ends:
                    complete.append((tokens, total + value))
                else:
                    candidates.append(([*tokens, token_id], total + value))
        running = sorted(candidates, key=lambda each: -each[1])[:width]
    complete += running
    return sorted(complete, key=lambda each: -each[1] / (len(prompt) + len(each[0])) ** penalty)[:width]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "long"])
@pytest.mark.parametrize(
    ("width", "length", "penalty", "stops"),
    [(1, 6, 1.0, ()), (3, 8, 1.0, ()), (4, 7, 0.0, ()), (3, 6, 2.0, range(60, 160)), (3, 6, -1.0, range(60, 160))],
)
def test_finds_what_the_definition_finds(
    llm: LLM, reference: PreTrainedModel, prompt: list[int], width: int, length: int, penalty: float, stops: Any
) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=length, length_penalty=penalty, stop_token_ids=list(stops))
    expected = search(reference, prompt, width, length, penalty, {EOS_TOKEN_ID, *stops})
    [output] = llm.beam_search([prompt], params)
    assert [each.tokens[len(prompt) :] for each in output.sequences] == [tokens for tokens, _ in expected]
    for found, (tokens, total) in zip(output.sequences, expected, strict=True):
        assert found.cum_logprob == pytest.approx(total, abs=1e-3)
        assert found.finish_reason == ("length" if len(tokens) == length else "stop")
        assert (found.stop_reason in stops) == (found.finish_reason == "stop" and bool(stops))
        assert sum(next(iter(row.values())).logprob for row in found.logprobs) == pytest.approx(total, abs=1e-3)


def test_early_stopping_takes_the_first_that_are_complete(llm: LLM) -> None:
    params = BeamSearchParams(
        beam_width=2, max_tokens=30, stop_token_ids=list(range(10, 250)), early_stopping=True, length_penalty=3.0
    )
    [early] = llm.beam_search(PROMPTS[0], params)
    params.early_stopping = False
    [patient] = llm.beam_search(PROMPTS[0], params)
    assert max(len(each.tokens) for each in early.sequences) < max(len(each.tokens) for each in patient.sequences)


def test_many_prompts_keep_their_order(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    prompts = [[50 + i, 7] for i in range(12)]
    outputs = llm.beam_search(prompts, params, concurrency_limit=4)
    assert [output.sequences[0].tokens[:2] for output in outputs] == prompts
    assert all(output.sequences[0].text for output in outputs)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 10_000}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 200}, "max_tokens"),
        ({"temperature": 0.7}, "temperature"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, "structured_outputs"),
        ({"watermarking": True}, "watermarking"),
    ],
)
def test_wrong_parameters_are_named(llm: LLM, options: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        llm.beam_search(PROMPTS, BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **options}))
    assert caught.value.param == param


def test_special_tokens_are_text_where_they_are_asked_for(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [0, 1, *PROMPTS[0]]}  # <|endoftext|>, <|im_start|>
    for options, shown in (
        ({}, []),
        ({"shown_special_token_ids": [1]}, ["<|im_start|>"]),
        ({"skip_special_tokens": False}, ["<|endoftext|>", "<|im_start|>"]),
    ):
        params = BeamSearchParams(beam_width=1, max_tokens=2, **options)  # type: ignore[arg-type]
        [output] = llm.beam_search([prompt], params)
        text = output.sequences[0].text
        assert text is not None
        assert [token for token in ("<|endoftext|>", "<|im_start|>") if token in text] == shown


def test_a_model_that_reads_prompts_otherwise_than_outputs_refuses(tmp_path: Path) -> None:
    """A beam's output would become a part of a prompt, whose tokens all see each other."""
    write_checkpoint(tmp_path, "cpmant")
    with (
        LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=16, device="cpu") as llm,
        pytest.raises(ParameterError, match="reads prompts in both directions") as caught,
    ):
        llm.beam_search([{"prompt_token_ids": [5, 6]}], BeamSearchParams(beam_width=2, max_tokens=2))
    assert caught.value.param == "use_beam_search"
