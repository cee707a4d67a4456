"""Prompts in every form, and texts that are far too long."""

import asyncio
import threading
from pathlib import Path

import pytest

from quire.core.errors import ParameterError
from quire.frontend.requests.async_tokenizer import AsyncTokenizer
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.prompt_reader import PromptReader
from quire.frontend.text.fast_backend import FastBackend
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.text.truncation import Truncation
from tests.frontend.text import tokenizers_zoo

VOCAB_SIZE = 400
_CUT = "truncate_prompt_tokens"
TOKENIZER = Tokenizer(
    FastBackend(tokenizers_zoo.byte_level()),
    special_tokens={"bos_token": "<s>"},
    chat_templates={},
    folder=Path("nowhere"),
)


def open_tokenizer(tokenizer: Tokenizer | None = TOKENIZER, max_model_len: int = 64) -> AsyncTokenizer:
    return AsyncTokenizer(tokenizer, ContextLimit(max_model_len))


def make(tokenizer: Tokenizer | None = TOKENIZER, max_model_len: int = 64) -> PromptReader:
    limit = ContextLimit(max_model_len)
    return PromptReader(AsyncTokenizer(tokenizer, limit), limit, vocab_size=VOCAB_SIZE)


def read(prompt, reader: PromptReader | None = None, **options: bool) -> Prompt:
    return asyncio.run((reader or make()).read(prompt, **options))


class TestPrompts:
    def test_every_form(self) -> None:
        ids = TOKENIZER.encode("the quick fox")
        assert read("the quick fox") == Prompt("the quick fox", ids)
        assert read({"prompt": "the quick fox", "cache_salt": "s"}) == Prompt("the quick fox", ids, "s")
        assert read(ids) == Prompt(None, ids)
        assert read({"prompt_token_ids": ids}) == Prompt(None, ids)
        assert read({"prompt": "shown", "prompt_token_ids": ids}) == Prompt("shown", ids)

    def test_a_text_that_is_tokenized_already_is_checked_and_not_copied(self) -> None:
        prompt = Prompt("the quick fox", [1, 2], "s")
        assert read(prompt) is prompt
        with pytest.raises(ParameterError, match=f"Token id {VOCAB_SIZE}"):
            read(Prompt("x", [VOCAB_SIZE]))

    def test_embeddings_are_refused_unless_they_were_asked_for(self) -> None:
        with pytest.raises(ParameterError, match="--enable-prompt-embeds") as caught:
            read({"prompt_embeds": b""})
        assert caught.value.param == "prompt_embeds"

    def test_a_few_short_texts_are_tokenized_without_a_thread(self) -> None:
        texts = ["the quick fox", "", "a brown fox"]
        for many, takes_thread in ((texts, False), (texts * 200, True)):
            tokenizer, threads = open_tokenizer(), set(threading.enumerate())
            found = asyncio.run(tokenizer.tokenize_batch(many))
            assert found == [TOKENIZER.encode(text) for text in many]
            begun = {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - threads}
            assert ("tokenize" in begun) == takes_thread
            tokenizer.close()

    @pytest.mark.parametrize(
        ("truncation", "generates", "max_tokens", "param", "message"),
        [
            (
                Truncation(62),
                True,
                3,
                _CUT,
                f"{_CUT} must be -1, or from 1 to 61, the most tokens that max_model_len and",
            ),
            (
                Truncation(0),
                False,
                None,
                _CUT,
                f"{_CUT} must be -1, or from 1 to 64, the most tokens that the model reads",
            ),
            (Truncation(65, name="max_length"), False, None, "max_length", "max_length must be from 1 to 64, the most"),
            (Truncation(-1), True, 64, "max_tokens", "max_tokens asks for 64 tokens, but prompt and output together"),
        ],
    )
    def test_a_cut_that_cannot_be_made(
        self, truncation: Truncation, generates: bool, max_tokens: int | None, param: str, message: str
    ) -> None:
        limit = ContextLimit(64, generates=generates)
        reader = PromptReader(AsyncTokenizer(TOKENIZER, limit), limit, vocab_size=VOCAB_SIZE)
        with pytest.raises(ParameterError) as caught:
            reader.truncate(Prompt(None, [1, 2, 3]), truncation, max_tokens, has_special_tokens=False)
        assert (caught.value.param, str(caught.value)[: len(message)]) == (param, message)

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
            tokenizer, ended = open_tokenizer(), []

            async def tokenize(name: str, text: str) -> None:
                await tokenizer.tokenize(text, must_fit=False)
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
        longest = open_tokenizer().max_text_length
        assert len(read("x" * longest, must_fit=False).token_ids) > 64
        with pytest.raises(ParameterError, match=rf"has {longest + 1} characters; at most {longest} are") as caught:
            read("x" * (longest + 1), must_fit=False)
        assert caught.value.param == "prompt"

    def test_a_long_context_takes_longer_texts(self) -> None:
        text = "the quick brown fox " * 60_000
        assert len(text) > open_tokenizer().max_text_length
        assert read(text, make(max_model_len=100_000), must_fit=False).text == text

    def test_a_tokenizer_that_tells_no_least_length_is_bounded_too(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.from_folder(tokenizers_zoo.save(tokenizers_zoo.word_piece(), tmp_path))
        assert tokenizer.least_tokens(" " * 2**23) == 0
        with pytest.raises(ParameterError, match="8388608 characters; at most 1048576 are"):
            read(" " * 2**23, make(tokenizer=tokenizer))

    def test_without_a_tokenizer_only_ids_work(self) -> None:
        reader = make(tokenizer=None)
        assert read([1, 2], reader).token_ids == [1, 2]
        with pytest.raises(ParameterError, match="--skip-tokenizer-init"):
            read("text", reader)
