"""Requests as the engine gets them: prompts in every form, limits, defaults and seeds."""

import asyncio
from pathlib import Path

import pytest

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.requests.input_processor import InputProcessor, child_seed
from quire.frontend.requests.prompt import Prompt
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text import tokenizers_zoo

VOCAB_SIZE = 400
TOKENIZER = Tokenizer(
    tokenizers_zoo.byte_level(),
    special_tokens={"bos_token": "<s>"},
    chat_templates={"default": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", "tool_use": "T"},
    folder=Path("nowhere"),
)


def make(tokenizer: Tokenizer | None = TOKENIZER, seed: int = 0, **model) -> InputProcessor:
    served = ServedModel(names=["tiny"], folder="nowhere", **model)
    return InputProcessor(served, tokenizer, vocab_size=VOCAB_SIZE, max_model_len=64, seed=seed)


def read(prompt, processor: InputProcessor | None = None, **options: bool) -> Prompt:
    return asyncio.run((processor or make()).read_prompt(prompt, **options))


def build(prompt_length: int = 4, processor: InputProcessor | None = None, fit_context: bool = False, **sampling):
    prompt = Prompt(None, [5] * prompt_length)
    return list((processor or make()).build("id", prompt, SamplingParams(**sampling), fit_context=fit_context))


class TestPrompts:
    def test_every_form(self) -> None:
        ids = TOKENIZER.encode("the quick fox")
        assert read("the quick fox") == Prompt("the quick fox", ids)
        assert read({"prompt": "the quick fox", "cache_salt": "s"}) == Prompt("the quick fox", ids, "s")
        assert read(ids) == Prompt(None, ids)
        assert read({"prompt_token_ids": ids}) == Prompt(None, ids)
        assert read({"prompt": "shown", "prompt_token_ids": ids}) == Prompt("shown", ids)

    def test_embeddings_are_refused_unless_they_were_asked_for(self) -> None:
        with pytest.raises(ParameterError, match="--enable-prompt-embeds") as caught:
            read({"prompt_embeds": b""})
        assert caught.value.param == "prompt_embeds"

    def test_long_texts_are_tokenized_all_the_same(self) -> None:
        text = "the quick brown fox " * 1000
        assert read(text, must_fit=False).token_ids == TOKENIZER.encode(text)

    @pytest.mark.parametrize(
        ("prompt", "said"),
        [
            ("", "prompt is empty"),
            ([], "prompt is empty"),
            ([1, VOCAB_SIZE], f"Token id {VOCAB_SIZE} .*0 to {VOCAB_SIZE - 1}"),
            ([-1], "Token id -1"),
            ([1.5], "list of whole numbers"),
            ([True], "list of whole numbers"),
            (5, "not int"),
            ({}, "needs a string 'prompt'"),
            ({"prompt": "x", "image": "y"}, "cannot hold 'image'"),
            ("bad \udc00", "lone surrogate"),
            ("long " * 2000, "10000 characters"),
        ],
    )
    def test_bad_ones_are_refused(self, prompt, said: str) -> None:
        with pytest.raises(ParameterError, match=said) as caught:
            read(prompt)
        assert caught.value.param == "prompt"

    def test_prompts_do_not_wait_for_texts_that_are_larger_than_any(self) -> None:
        async def run() -> list[str]:
            processor, ended = make(), []

            async def tokenize(name: str, text: str) -> None:
                await processor.tokenize(text, must_fit=False)
                ended.append(name)

            await asyncio.gather(tokenize("large", "word " * 200_000), tokenize("long", "word " * 1000))
            return ended

        assert asyncio.run(run()) == ["long", "large"]

    def test_long_texts_are_refused_as_short_ones_are(self) -> None:
        with pytest.raises(ParameterError, match="lone surrogate"):
            read("long " * 2000 + "\udc00", must_fit=False)

    def test_what_cannot_fit_is_not_tokenized(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def encode_batch(*args: object, **options: object) -> None:
            pytest.fail("it was tokenized")

        text = "word " * 100_000
        assert len(read(text, must_fit=False).token_ids) > 64
        monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
        with pytest.raises(ParameterError, match=r"500000 characters.*at least \d+ tokens.*limited to 64") as caught:
            read(text)
        assert caught.value.param == "prompt"
        with pytest.raises(ParameterError, match=r"1000000 tokens.*at most 63"):
            read(["no id"] * 1_000_000)

    def test_a_text_that_is_to_be_cut_may_be_long_but_not_of_any_length(self) -> None:
        longest = make().max_text_length
        assert len(read("x" * longest, must_fit=False).token_ids) > 64
        with pytest.raises(ParameterError, match=rf"has {longest + 1} characters; at most {longest} are") as caught:
            read("x" * (longest + 1), must_fit=False)
        assert caught.value.param == "prompt"

    def test_a_long_context_takes_longer_texts(self) -> None:
        processor = make()
        processor.max_model_len = 100_000
        text = "the quick brown fox " * 60_000
        assert len(text) > make().max_text_length
        assert read(text, processor, must_fit=False).text == text

    def test_a_tokenizer_that_tells_no_least_length_is_bounded_too(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.from_folder(tokenizers_zoo.save(tokenizers_zoo.word_piece(), tmp_path))
        assert tokenizer.least_tokens(" " * 2**23) == 0
        with pytest.raises(ParameterError, match="8388608 characters; at most 1048576 are"):
            read(" " * 2**23, make(tokenizer=tokenizer))

    def test_without_a_tokenizer_only_ids_work(self) -> None:
        processor = make(tokenizer=None)
        assert read([1, 2], processor).token_ids == [1, 2]
        with pytest.raises(ParameterError, match="--skip-tokenizer-init"):
            read("text", processor)
        with pytest.raises(ParameterError, match="detokenize=False"):
            build(processor=processor)
        assert build(processor=processor, detokenize=False)


class TestLengths:
    def test_the_rest_of_the_context_is_the_default(self) -> None:
        assert build(10, max_tokens=None)[0].sampling.max_tokens == 54

    def test_the_context_holds_prompt_and_output(self) -> None:
        assert build(60, max_tokens=4)[0].sampling.max_tokens == 4
        with pytest.raises(ParameterError, match=r"60 tokens and max_tokens asks for 5 .*64.*lower max_tokens to 4"):
            build(60, max_tokens=5)
        assert build(60, max_tokens=5, fit_context=True)[0].sampling.max_tokens == 4

    def test_a_prompt_without_room_for_an_answer(self) -> None:
        for fit_context in (False, True):
            with pytest.raises(ParameterError, match=r"64 tokens.*shorten the prompt to at most 63"):
                build(64, max_tokens=1, fit_context=fit_context)


class TestSampling:
    def test_n_requests_with_seeds_of_their_own(self) -> None:
        requests = build(n=3, seed=7, stop=["x"])
        assert [request.request_id for request in requests] == ["id_0", "id_1", "id_2"]
        assert [request.sampling.n for request in requests] == [1, 1, 1]
        seeds = [request.sampling.seed for request in requests]
        assert seeds[0] == 7
        assert len(set(seeds)) == 3
        assert seeds == [request.sampling.seed for request in build(n=3, seed=7)]
        assert build(seed=7)[0].request_id == "id"

    def test_drawn_seeds_follow_the_models_seed(self) -> None:
        def draws(seed: int) -> list[int | None]:
            processor = make(seed=seed)
            return [build(processor=processor)[0].sampling.seed for _ in range(3)]

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
        assert build(logprobs=-1, processor=make(max_logprobs=-1))

    def test_stop_token_ids_must_exist(self) -> None:
        assert build(stop_token_ids=[VOCAB_SIZE - 1])
        with pytest.raises(ParameterError, match=f"stop_token_ids holds {VOCAB_SIZE}"):
            build(stop_token_ids=[VOCAB_SIZE])

    def test_the_checkpoints_defaults(self) -> None:
        processor = make(default_sampling={"temperature": 0.6, "max_tokens": 9})
        assert processor.default_sampling_params() == SamplingParams(temperature=0.6, max_tokens=9)


class TestChat:
    MESSAGES = [{"role": "user", "content": "hi"}]  # noqa: RUF012

    def test_the_checkpoints_template_or_the_callers(self) -> None:
        assert make().render_chat(self.MESSAGES) == "<s>hi"
        assert make().render_chat(self.MESSAGES, tools=[{"type": "function"}]) == "T"
        assert make().render_chat(self.MESSAGES, chat_template="tool_use") == "T"
        assert make().render_chat(self.MESSAGES, chat_template="{{ messages | length }}") == "1"
        assert make().render_chat(self.MESSAGES, chat_template="{{ x }}", chat_template_kwargs={"x": 3}) == "3"

    def test_no_template(self) -> None:
        bare = Tokenizer(tokenizers_zoo.byte_level(), special_tokens={}, chat_templates={}, folder=Path("x"))
        with pytest.raises(ParameterError, match=r"'tiny' has no chat template.*--chat-template"):
            make(bare).render_chat(self.MESSAGES)

    def test_no_messages(self) -> None:
        with pytest.raises(ParameterError, match="must not be empty"):
            make().render_chat([])
