"""The texts of single tokens, as log-probabilities show them: joined, they are the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.text.token_stream import open_stream
from quire.frontend.text.token_texts import texts_after
from quire.frontend.text.tokenizer import Tokenizer
from tests.frontend.text.test_detokenizer import TOKENIZERS, some_text

SPLIT = "A日🙂é."


def texts_of(tokenizer: Tokenizer, token_ids: list[int], before: list[int] | None = None) -> list[str]:
    """The texts of tokens, the last with the rest."""
    place, texts = texts_after(tokenizer, before or []), []
    for token_id in token_ids:
        texts.append(place.text(token_id))
        place.advance(token_id)
    return [*texts[:-1], texts[-1] + place.rest()] if texts else []


@pytest.mark.parametrize("name", TOKENIZERS)
def test_joined_they_are_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]

    @settings(max_examples=100, deadline=None)
    @given(some_text, st.integers(0, 40))
    def check(text: str, cut: int) -> None:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(texts_of(tokenizer, token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=False)
        before, after = token_ids[:cut], token_ids[cut:]  # perhaps within a character
        stream = open_stream(tokenizer, before, skip_special_tokens=False)
        expected = "".join([*map(stream.push, after), stream.flush()])
        if after:
            assert "".join(texts_of(tokenizer, after, before)) == expected

    check()


@pytest.mark.parametrize("name", ["byte-level", "llama-2", "gemma"])
def test_the_token_that_completes_a_character_has_it(name: str) -> None:
    """As in vLLM: the tokens before it have no text."""
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(SPLIT, add_special_tokens=False)
    texts = texts_of(tokenizer, token_ids)
    assert [text for text in texts if text.strip()] == list(SPLIT)
    assert texts.count("") >= 3
    assert b"".join(map(tokenizer.piece, token_ids)).decode().strip() == SPLIT


def test_an_end_within_a_character_is_the_last_tokens() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = tokenizer.encode("é日", add_special_tokens=False)[:-1]
    assert "".join(texts_of(tokenizer, token_ids)) == "é\N{REPLACEMENT CHARACTER}"
    assert texts_of(tokenizer, token_ids)[-1] == "\N{REPLACEMENT CHARACTER}"


def test_what_another_token_would_have_added() -> None:
    """Alternatives at one place are read behind the same tokens."""
    tokenizer = TOKENIZERS["byte-level"]
    first, last = tokenizer.encode("é", add_special_tokens=False)
    [a] = tokenizer.encode("a", add_special_tokens=False)
    place = texts_after(tokenizer, [a, first])
    assert [place.text(each) for each in (last, a, first)] == [
        "é",
        "\N{REPLACEMENT CHARACTER}a",
        "\N{REPLACEMENT CHARACTER}",
    ]
    assert place.text(last) == "é"
