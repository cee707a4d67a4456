"""Streamed text: equal to the text of all ids at once, however the ids are cut, and stopped at the right place."""

import itertools
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.text.detokenizer import Detokenizer
from quire.frontend.text.fast_backend import FastBackend
from quire.frontend.text.stop_strings import StopScanner
from quire.frontend.text.token_stream import open_stream
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text import tokenizers_zoo


def wrap(backend) -> Tokenizer:
    return Tokenizer(FastBackend(backend), special_tokens={}, chat_templates={}, folder=Path("nowhere"))


TOKENIZERS = {name: wrap(make()) for name, make in tokenizers_zoo.ALL.items()}
BYTE_LEVEL = TOKENIZERS["byte-level"]
some_text = st.text(  # without SentencePiece's own character for a space, which decoders turn into a space
    st.characters(exclude_categories=["Cs"], exclude_characters="▁") | st.sampled_from("the quick🙂é你\n \u200d\ufffd"),
    max_size=40,
)


def stream(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None, **options) -> list[str]:
    """The pieces of text; the flushed rest is last."""
    stream = open_stream(tokenizer, prompt or [], **options)
    return [*map(stream.push, token_ids), stream.flush()]


def test_the_kinds_are_told_apart() -> None:
    assert {name: tokenizer.kind for name, tokenizer in TOKENIZERS.items()} == {
        "byte-level": "byte_level",
        "llama-2": "byte_fallback",
        "gemma": "byte_fallback",
        "metaspace": "other",
        "word-piece": "other",
    }


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False], ids=["skip-special", "keep-special"])
def test_random_ids_join_up_to_the_one_shot_decode(name: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))  # two ids beyond the vocabulary
    def check(token_ids: list[int]) -> None:
        pieces = stream(tokenizer, token_ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("name", ["byte-level", "llama-2", "gemma"])
@settings(max_examples=100, deadline=None)
@given(text=some_text)
def test_text_streams_without_replacement_characters(name: str, text: str) -> None:
    assume(not any(special in text for special in tokenizers_zoo.SPECIAL))  # shown only on request
    tokenizer = TOKENIZERS[name]
    pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    whole = text if name != "gemma" or not text else " " + text  # its decoder keeps the space before a text
    assert "".join(pieces) == whole
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(text=some_text)
def test_every_split_into_prompt_and_output_continues_the_text(text: str) -> None:
    """Wherever the prompt ends, both texts joined are the whole text, except for a character cut in two."""
    for name in ("byte-level", "llama-2"):
        tokenizer = TOKENIZERS[name]
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        for cut in range(len(token_ids) + 1):
            prompt, output = token_ids[:cut], token_ids[cut:]
            before = tokenizer.decode(prompt)
            if name == "llama-2" and "\ufffd" in before:
                continue  # half a character turns the whole run of byte tokens before it into U+FFFD
            before = before.rstrip("\ufffd")
            after = "".join(stream(tokenizer, output, prompt))
            assert (before + after).replace("\ufffd", "") == text.replace("\ufffd", "")


def test_a_multi_token_character_appears_when_it_is_complete() -> None:
    token_ids = BYTE_LEVEL.encode("𐍈", add_special_tokens=False)
    assert len(token_ids) == 4
    assert stream(BYTE_LEVEL, token_ids) == ["", "", "", "𐍈", ""]
    assert stream(BYTE_LEVEL, token_ids[:3]) == ["", "", "", "\ufffd"]


def test_leading_space_is_kept_after_a_prompt_and_stripped_at_a_start() -> None:
    tokenizer = TOKENIZERS["llama-2"]
    the = tokenizer.token_id("▁the")
    assert "".join(stream(tokenizer, [the, the])) == "the the"
    assert "".join(stream(tokenizer, [the], prompt=[the])) == " the"
    assert "".join(stream(tokenizer, [the], prompt=[tokenizer.token_id("<s>")])) == "the"


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    tokenizer = TOKENIZERS["word-piece"]
    token_ids = [0, 1, tokenizer.token_id("the"), 1, 2]
    options = {"skip_special_tokens": False}
    assert "".join(stream(tokenizer, token_ids, **options)) == "<s> </s> the </s> <pad>"
    options["spaces_between_special_tokens"] = False
    assert "".join(stream(tokenizer, token_ids, **options)) == "<s></s> the </s><pad>"


# --------------------------------------------------------------------------------------------------------------- stops


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition: the stop string that the earliest character completes, the longest if there are several."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return end, max(done, key=len)
    return None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_scanner_finds_the_first_stop_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    scanner = StopScanner(stops)
    found, position = None, 0
    for start, end in itertools.pairwise(bounds):
        match = scanner.scan(text[start:end])
        if match is not None:
            found = position + match.end, match.stop
            break
        position = end
        held = text[end - scanner.held : end]
        longest = max(
            (k for k in range(end + 1) for s in stops if k < len(s) and text[:end].endswith(s[:k])), default=0
        )
        assert len(held) == longest, "exactly what may begin a stop string is kept back"
    assert found == first_stop(text, stops)


def run(token_ids: list[int], sampling: SamplingParams, chunk: int) -> tuple[list[str], int, str | None]:
    """(texts, number of tokens that count, stop string) with `chunk` tokens a push."""
    detokenizer = Detokenizer(BYTE_LEVEL, [], sampling)
    texts, counted = [], 0
    for start in range(0, len(token_ids), chunk):
        text, count = detokenizer.push(token_ids[start : start + chunk])
        texts.append(text)
        counted += count
        if detokenizer.stop is not None:
            return texts, counted, detokenizer.stop
    return [*texts, detokenizer.finish()], counted, detokenizer.stop


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc🙂", max_size=25),
    stops=st.lists(st.text("abc🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    chunk=st.integers(1, 7),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_stop_strings_cut_text_and_tokens(
    text: str, stops: list[str], chunk: int, include: bool, min_tokens: int
) -> None:
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    sampling = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=max(len(token_ids), 6)
    )
    texts, counted, stop = run(token_ids, sampling, chunk)
    expected, expected_stop, expected_count = text, None, len(token_ids)
    for count in range(min_tokens + 1, len(token_ids) + 1):  # the definition, token by token
        before = len(BYTE_LEVEL.decode(token_ids[: count - 1]).rstrip("\ufffd"))
        now = BYTE_LEVEL.decode(token_ids[:count]).rstrip("\ufffd")
        ends = [
            (end, -len(stop), stop)
            for stop in stops
            for end in range(before + 1, len(now) + 1)
            if now[:end].endswith(stop)
        ]
        if ends:
            end, _, expected_stop = min(ends)
            expected = now[: end if include else end - len(expected_stop)]
            expected_count = count
            break
    assert ("".join(texts), counted, stop) == (expected, expected_count, expected_stop)


def test_text_that_cannot_begin_a_stop_string_is_not_kept_back() -> None:
    sampling = SamplingParams(stop=["END of text"])
    detokenizer = Detokenizer(BYTE_LEVEL, [], sampling)
    encode = lambda text: BYTE_LEVEL.encode(text, add_special_tokens=False)  # noqa: E731
    assert detokenizer.push(encode("hello E"))[0] == "hello "
    assert detokenizer.push(encode("ND o"))[0] == ""
    assert detokenizer.push(encode("h!"))[0] == "END oh!"
    assert detokenizer.push(encode("EN"))[0] == ""
    assert detokenizer.finish() == "EN"
