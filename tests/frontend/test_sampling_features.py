"""Sampling parameters on a real engine, against transformers' own logits of the same checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire import LLM, SamplingParams
from quire.core.errors import ParameterError
from quire.frontend.outputs import CompletionOutput
from tests.checkpoints import VOCAB_SIZE

PROMPT = [40 + 7 * i % 200 for i in range(30)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("llama"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, max_model_len=256, num_gpu_blocks_override=256, max_num_batched_tokens=64, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits_of(reference: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size] float32."""
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0]


def greedy_reference(
    reference: PreTrainedModel,
    prompt: list[int],
    change: Callable[[torch.Tensor, list[int]], None],
    num_tokens: int = 8,
) -> list[int]:
    """Greedy tokens when `change(logits, output so far)` alters the logits before each is chosen."""
    output: list[int] = []
    for _ in range(num_tokens):
        logits = logits_of(reference, prompt + output)[-1].clone()
        change(logits, output)
        output.append(int(logits.argmax()))
    return output


def complete(llm: LLM, sampling: SamplingParams, prompt: Any = PROMPT) -> CompletionOutput:
    return llm.generate(prompt, sampling)[0].outputs[0]


class TestTokenLists:
    def test_logit_bias(self, llm: LLM, reference: PreTrainedModel) -> None:
        plain = complete(llm, GREEDY).token_ids
        bias = {plain[0]: -100.0, plain[1]: -3.5, 77: 2.5, 78: 4.0}

        def change(logits: torch.Tensor, output: list[int]) -> None:
            for token_id, value in bias.items():
                logits[token_id] += value

        expected = greedy_reference(reference, PROMPT, change)
        assert complete(llm, GREEDY.replace(logit_bias=bias)).token_ids == expected
        assert expected != plain

    def test_allowed_token_ids(self, llm: LLM, reference: PreTrainedModel) -> None:
        allowed = list(range(50, 80))

        def change(logits: torch.Tensor, output: list[int]) -> None:
            kept = logits[allowed].clone()
            logits.fill_(-torch.inf)
            logits[allowed] = kept

        expected = greedy_reference(reference, PROMPT, change)
        assert complete(llm, GREEDY.replace(allowed_token_ids=allowed)).token_ids == expected
        drawn = complete(llm, SamplingParams(seed=1, max_tokens=40, ignore_eos=True, allowed_token_ids=allowed))
        assert set(drawn.token_ids) <= set(allowed)
        assert len(set(drawn.token_ids)) > 5

    def test_bad_words_of_one_and_of_several_tokens(self, llm: LLM, reference: PreTrainedModel) -> None:
        plain = complete(llm, GREEDY)
        tokenizer = llm.get_tokenizer()
        words = [tokenizer.decode(plain.token_ids[2:5]), "x"]
        sequences = []
        for word in words:
            bare, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word))
            sequences.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                sequences.append(spaced)

        def change(logits: torch.Tensor, output: list[int]) -> None:
            for *head, last in sequences:
                if output[len(output) - len(head) :] == head:
                    logits[last] = -torch.inf

        expected = greedy_reference(reference, PROMPT, change)
        assert complete(llm, GREEDY.replace(bad_words=words)).token_ids == expected

    def test_bad_words_forbid_what_was_about_to_come(self, llm: LLM) -> None:
        plain = complete(llm, GREEDY)
        for length in (1, 2, 3):
            sampling = GREEDY.replace(bad_words_token_ids=[plain.token_ids[3 : 3 + length]])
            changed = complete(llm, sampling).token_ids
            assert changed[: 2 + length] == plain.token_ids[: 2 + length]
            assert changed[2 + length] != plain.token_ids[2 + length]

    def test_a_prompt_may_hold_bad_words(self, llm: LLM) -> None:
        plain = complete(llm, GREEDY).token_ids
        sampling = GREEDY.replace(bad_words_token_ids=[[PROMPT[-1], plain[0]]])
        assert complete(llm, sampling).token_ids == plain

    @pytest.mark.parametrize(
        ("options", "param"),
        [
            ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
            ({"logit_bias": {5: 100.5}}, "logit_bias"),
            ({"logit_bias": {5: float("nan")}}, "logit_bias"),
            ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias"),
            ({"logit_bias": [1]}, "logit_bias"),
            ({"allowed_token_ids": []}, "allowed_token_ids"),
            ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
            ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
            ({"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}, "bad_words"),
            ({"allowed_token_ids": [5] * 1000, "n": 16000}, "n"),
            ({"bad_words": [" "]}, "bad_words"),
            ({"bad_words": ["a"] * 2000}, "bad_words"),
            ({"bad_words": ["a" * 70000]}, "bad_words"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_bad_lists_are_refused_by_name(self, llm: LLM, options: dict[str, Any], param: str) -> None:
        with pytest.raises(ParameterError) as caught:
            complete(llm, SamplingParams(**options))
        assert caught.value.param == param
