"""Requests as the engine gets them: limits, defaults and seeds."""

import asyncio
from pathlib import Path

import pytest

from quire.core.errors import ParameterError
from quire.core.wire.protocol import EngineRequest
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.request_builder import RequestBuilder, child_seed
from quire.frontend.requests.sampling_input import SamplingInput
from quire.frontend.requests.submission import Submission
from quire.frontend.text.fast_backend import FastBackend
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text import tokenizers_zoo

VOCAB_SIZE = 400
TOKENIZER = Tokenizer(
    FastBackend(tokenizers_zoo.byte_level()), special_tokens={}, chat_templates={}, folder=Path("nowhere")
)


def sampling_input(tokenizer: Tokenizer | None = TOKENIZER, **model) -> SamplingInput:
    return SamplingInput(ServedModel(names=["tiny"], folder="nowhere", **model), tokenizer, vocab_size=VOCAB_SIZE)


def make(tokenizer: Tokenizer | None = TOKENIZER, seed: int = 0, **model) -> RequestBuilder:
    return RequestBuilder(sampling_input(tokenizer, **model), ContextLimit(64), seed=seed)


def build(
    prompt_length: int = 4, builder: RequestBuilder | None = None, fit_context: bool = False, **sampling
) -> EngineRequest:
    prompt = Prompt(None, [5] * prompt_length)
    built = (builder or make()).build(Submission(prompt, SamplingParams(**sampling), "id", fit_context=fit_context))
    return asyncio.run(built)


class TestLengths:
    def test_the_rest_of_the_context_is_the_default(self) -> None:
        assert build(10, max_tokens=None).sampling.max_tokens == 54

    def test_the_context_holds_prompt_and_output(self) -> None:
        assert build(60, max_tokens=4).sampling.max_tokens == 4
        with pytest.raises(ParameterError, match=r"60 tokens and max_tokens asks for 5 .*64.*lower max_tokens to 4"):
            build(60, max_tokens=5)
        assert build(60, max_tokens=5, fit_context=True).sampling.max_tokens == 4

    def test_a_prompt_without_room_for_an_answer(self) -> None:
        for fit_context in (False, True):
            with pytest.raises(ParameterError, match=r"64 tokens.*shorten the prompt to at most 63"):
                build(64, max_tokens=1, fit_context=fit_context)


class TestSampling:
    def test_n_sequences_with_seeds_of_their_own(self) -> None:
        request = build(n=3, seed=7, stop=["x"], prompt_logprobs=1)
        assert [start.request_id for start in request.sequences] == ["id_0", "id_1", "id_2"]
        assert [start.scores_prompt for start in request.sequences] == [True, False, False]
        assert (request.sampling.n, request.sampling.seed, request.sampling.stop) == (1, None, None)
        seeds = [start.seed for start in request.sequences]
        assert seeds == [7, 8483367915304847654, 3068249057399463944]  # for ever: clients repeat their requests
        assert build(seed=7).sequences[0].request_id == "id"

    def test_drawn_seeds_follow_the_models_seed(self) -> None:
        def draws(seed: int) -> list[int]:
            builder = make(seed=seed)
            return [build(builder=builder).sequences[0].seed for _ in range(3)]

        assert draws(1) == draws(1)
        assert len({*draws(1), *draws(2)}) == 6

    def test_child_seeds_are_seeds(self) -> None:
        for seed in (0, -(2**63), 2**64 - 1):
            assert child_seed(seed, 0) == seed
            assert all(0 <= child_seed(seed, index) < 2**63 for index in range(1, 50))

    def test_the_limit_on_logprobs(self) -> None:
        assert build(logprobs=20)
        for asked in (21, -1):
            with pytest.raises(ParameterError, match=r"at most 20.*--max-logprobs") as caught:
                build(logprobs=asked)
            assert caught.value.param == "logprobs"
        for limit in (-1, VOCAB_SIZE):
            assert build(logprobs=-1, prompt_logprobs=-1, builder=make(max_logprobs=limit))
        with pytest.raises(ParameterError, match=f"prompt_logprobs asks for {VOCAB_SIZE}, but at most 399"):
            build(prompt_logprobs=-1, builder=make(max_logprobs=399))

    @pytest.mark.parametrize("word", ["the", " river", "xyz"])
    def test_bad_words_are_forbidden_with_and_without_a_space(self, word: str) -> None:
        bare, spaced = (TOKENIZER.encode(text, add_special_tokens=False) for text in (word.strip(), " " + word.strip()))
        sequences = build(bad_words=[word]).sampling.bad_words_token_ids
        assert sequences is not None
        for output in (bare, spaced):
            assert any(output[-len(each) :] == each for each in sequences)
        assert sequences[0] == bare
        assert len(sequences) == (1 if spaced[1:] == bare else 2), "what the first forbids is not said again"

    def test_without_a_tokenizer_there_is_no_text(self) -> None:
        builder = make(tokenizer=None)
        with pytest.raises(ParameterError, match="detokenize=False"):
            build(builder=builder)
        assert build(builder=builder, detokenize=False)

    def test_stop_token_ids_must_exist(self) -> None:
        assert build(stop_token_ids=[VOCAB_SIZE - 1])
        with pytest.raises(ParameterError, match=f"stop_token_ids holds {VOCAB_SIZE}"):
            build(stop_token_ids=[VOCAB_SIZE])

    def test_the_checkpoints_defaults(self) -> None:
        made = sampling_input(default_sampling={"temperature": 0.6, "max_tokens": 9})
        assert made.default_params() == SamplingParams(temperature=0.6, max_tokens=9)
