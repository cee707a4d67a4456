"""Sampling parameters on a real engine, against transformers' own logits of the same checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire import LLM, SamplingParams
from quire.core.errors import EngineError, ParameterError
from quire.core.wire.repetition import RepetitionDetection
from quire.core.wire.sampling_params import ThinkingMarks
from quire.frontend.outputs import CompletionOutput
from quire.frontend.parsing.answers.parsers import OutputParsers
from tests.checkpoints import VOCAB_SIZE

PROMPT = [40 + 7 * i % 200 for i in range(30)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("llama"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    processors = ["tests.executor.processors:Forced", "tests.executor.processors:Broken"]
    options = {"max_model_len": 256, "num_gpu_blocks_override": 256, "max_num_batched_tokens": 64, "device": "cpu"}
    with LLM(folder, logits_processors=processors, **options) as llm:
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
            if spaced[-len(bare) :] != bare:
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
            ({"bad_words_token_ids": [[5], []]}, "bad_words_token_ids"),
            ({"bad_words_token_ids": [[5, 10**6]]}, "bad_words_token_ids"),
            ({"bad_words_token_ids": [[-2]]}, "bad_words_token_ids"),
            ({"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}, "bad_words"),
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


def prompt_reference(reference: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """[len(prompt) - 1, vocab_size]: log-probabilities of what follows each token but the last."""
    return logits_of(reference, prompt)[:-1].log_softmax(-1)


class TestLogprobs:
    @pytest.mark.parametrize("length", [1, 2, 17, 150])  # within a page, over pages, over three steps of 64 tokens
    def test_prompt_logprobs(self, llm: LLM, reference: PreTrainedModel, length: int) -> None:
        prompt = [30 + 11 * i * i % 250 for i in range(length)]
        llm.generate(prompt, GREEDY)  # what is in the prefix cache is computed again
        [output] = llm.generate(prompt, GREEDY.replace(prompt_logprobs=3))
        rows = output.prompt_logprobs
        assert rows is not None
        assert rows[0] is None
        assert len(rows) == length
        expected = prompt_reference(reference, prompt)
        for token_id, row, values in zip(prompt[1:], rows[1:], expected, strict=True):
            assert row is not None
            top = values.topk(3)
            assert next(iter(row)) == token_id
            assert set(row) == {token_id, *top.indices.tolist()}
            for other, entry in row.items():
                assert entry.logprob == pytest.approx(values[other].item(), abs=1e-4)
                assert entry.rank == int((values > values[other]).sum()) + 1
        assert output.outputs[0].token_ids == complete(llm, GREEDY, prompt).token_ids

    def test_prompt_logprobs_of_many_at_once_and_of_n(self, llm: LLM, reference: PreTrainedModel) -> None:
        prompts = [PROMPT + [5 + i] * (20 * i) for i in range(6)]
        sampling = SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
        plain = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
        without = llm.generate(prompts, plain)
        for prompt, output, same in zip(prompts, llm.generate(prompts, sampling), without, strict=True):
            values = prompt_reference(reference, prompt)
            assert output.prompt_logprobs is not None
            for place, row in enumerate(output.prompt_logprobs[1:]):
                assert row is not None
                [(token_id, entry)] = row.items()
                assert token_id == prompt[place + 1]
                assert entry.logprob == pytest.approx(values[place, token_id].item(), abs=1e-4)
            assert [each.token_ids for each in output.outputs] == [each.token_ids for each in same.outputs]

    def test_of_named_tokens(self, llm: LLM, reference: PreTrainedModel) -> None:
        named = [9, 200, 31]
        sampling = [GREEDY.replace(logprob_token_ids=named), GREEDY.replace(logprobs=1), GREEDY.replace(logprobs=5)]
        chosen, *others = [each.outputs[0] for each in llm.generate([PROMPT] * 3, sampling)]
        values = logits_of(reference, PROMPT)[-1].log_softmax(-1)
        assert chosen.logprobs is not None
        row = chosen.logprobs[0]
        assert list(row) == [chosen.token_ids[0], *named]
        for token_id, entry in row.items():
            assert entry.logprob == pytest.approx(values[token_id].item(), abs=1e-4)
            assert entry.rank == (1 if token_id == chosen.token_ids[0] else None)
        for count, completion in zip((1, 5), others, strict=True):  # rows of the same step that named none
            assert completion.logprobs is not None
            assert set(completion.logprobs[0]) == set(values.topk(count).indices.tolist())

    @pytest.mark.parametrize(
        ("options", "param"),
        [
            ({"prompt_logprobs": 21}, "prompt_logprobs"),
            ({"prompt_logprobs": -1}, "prompt_logprobs"),
            ({"prompt_logprobs": -2}, "prompt_logprobs"),
            ({"logprobs": 21}, "logprobs"),
            ({"logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids"),
            ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
            ({"logprob_token_ids": [1, 2], "logprobs": 1}, "logprob_token_ids"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_too_many_are_refused_by_name(self, llm: LLM, options: dict[str, Any], param: str) -> None:
        with pytest.raises(ParameterError) as caught:
            complete(llm, SamplingParams(**options))
        assert caught.value.param == param


def test_limits_that_leave_no_token_are_the_requests_fault(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="rule out each other"):
        complete(llm, GREEDY.replace(allowed_token_ids=[9], bad_words_token_ids=[[9, 9]]))
    assert complete(llm, GREEDY.replace(allowed_token_ids=[9], bad_words_token_ids=[[9, 8]])).token_ids == [9] * 8


class TestRepetition:
    def test_an_output_that_repeats_itself_ends(self, llm: LLM) -> None:
        sampling = GREEDY.replace(
            max_tokens=50,
            allowed_token_ids=[9],
            repetition_detection=RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=3),
        )
        stuck, late, other = llm.generate([[9] * 20] * 3, [sampling, sampling.replace(min_tokens=11), GREEDY])
        assert stuck.outputs[0].token_ids == [9] * 6
        assert (stuck.outputs[0].finish_reason, stuck.outputs[0].stop_reason) == ("repetition", "repetition_detected")
        assert late.outputs[0].token_ids == [9] * 11
        assert other.outputs[0].finish_reason == "length"


class TestCustomProcessors:
    def test_they_change_what_asks_for_them_and_nothing_else(self, llm: LLM) -> None:
        plain = complete(llm, GREEDY).token_ids
        forced = GREEDY.replace(extra_args={"forced_token_id": 123})
        outputs = [each.outputs[0].token_ids for each in llm.generate([PROMPT] * 3, [GREEDY, forced, GREEDY])]
        assert outputs[0] == outputs[2] == plain
        assert outputs[1][::2] == [123] * 4
        assert outputs[1][1::2] != [123] * 4

    def test_what_they_refuse_is_the_requests_fault(self, llm: LLM) -> None:
        with pytest.raises(ParameterError, match="forced_token_id must be a token id, got 'x'"):
            complete(llm, GREEDY.replace(extra_args={"forced_token_id": "x"}))
        with pytest.raises((ParameterError, EngineError), match="Broken failed"):
            complete(llm, GREEDY.replace(extra_args={"broken": True}))
        assert len(complete(llm, GREEDY).token_ids) == 8


class TestThinkingBudget:
    BUDGETED = GREEDY.replace(max_tokens=20, thinking_token_budget=5)

    def test_reasoning_that_the_prompt_opened_is_closed(self, llm: LLM) -> None:
        plain = complete(llm, GREEDY.replace(max_tokens=20)).token_ids
        absent = [each for each in range(60, 300) if each not in plain]
        marks = ThinkingMarks(begin=[[absent[0]]], end=[absent[1:4], [absent[4]]], opened=True)
        output = complete(llm, self.BUDGETED.replace(thinking=marks)).token_ids
        assert output[:5] == plain[:5]
        assert output[5:8] == absent[1:4]
        assert len(output) == 20
        assert complete(llm, self.BUDGETED.replace(thinking=marks, thinking_token_budget=-1)).token_ids == plain
        assert (
            complete(llm, self.BUDGETED.replace(thinking=marks, thinking_token_budget=0)).token_ids[:3] == absent[1:4]
        )

    def test_it_counts_from_where_the_output_opens_it(self, llm: LLM) -> None:
        plain = complete(llm, GREEDY.replace(max_tokens=20)).token_ids
        end = next(each for each in range(60, 300) if each not in plain)
        at = next(place for place in range(2, 8) if plain.index(plain[place]) == place)
        output = complete(
            llm, self.BUDGETED.replace(thinking=ThinkingMarks(begin=[[plain[at]]], end=[[end]]))
        ).token_ids
        assert output[: at + 6] == plain[: at + 6]
        assert output[at + 6] == end

    def test_reasoning_that_ends_in_time_is_left_alone(self, llm: LLM) -> None:
        plain = complete(llm, GREEDY.replace(max_tokens=20)).token_ids
        marks = ThinkingMarks(begin=[[299]], end=[[plain[3]]], opened=True)
        assert complete(llm, self.BUDGETED.replace(thinking=marks)).token_ids == plain

    def test_a_reasoning_parser_knows_the_marks(self, llm: LLM) -> None:
        encode = llm._llm.async_tokenizer.tokenizer.encode
        parsers = OutputParsers(reasoning_parser="qwen3")
        marks = parsers.thinking_marks("<|im_start|>assistant\n<think>\n", encode)
        assert marks == ThinkingMarks(begin=[encode("<think>")], end=[encode("</think>")], opened=True)
        assert marks.end[0] != marks.begin[0]
        closed = parsers.thinking_marks("<think>\n\n</think>\n\n", encode)
        assert closed is not None
        assert not closed.opened
        assert OutputParsers().thinking_marks("<think>", encode) is None

    def test_without_marks_it_is_refused(self, llm: LLM) -> None:
        with pytest.raises(ParameterError, match="--reasoning-parser") as caught:
            complete(llm, self.BUDGETED)
        assert caught.value.param == "thinking_token_budget"
