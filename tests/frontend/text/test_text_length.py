"""The length of a text bounds its number of tokens if the tokenizer drops no character; else there is no bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from quire.frontend.text.text_length import LengthBound, find_bound
from tests.frontend.text import tokenizers_zoo

TEXTS = st.text(
    st.sampled_from(" \n\u2003aehqtux😀é你e\u0301\u0300\u1f82ﬃ▁") | st.characters(exclude_categories=["Cs"])
)


def composing() -> Tokenizer:
    tokenizer = tokenizers_zoo.byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def swallowing() -> Tokenizer:
    """A tokenizer with an added token that absorbs the spaces on both sides."""
    tokenizer = tokenizers_zoo.byte_level()
    tokenizer.add_tokens([AddedToken("q", lstrip=True, rstrip=True)])
    return tokenizer


BOUNDED = {
    "byte-level": tokenizers_zoo.byte_level,
    "llama-2": tokenizers_zoo.byte_fallback,
    "gemma": lambda: tokenizers_zoo.byte_fallback(strip=False),
    "composing": composing,
    "swallowing": swallowing,
}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens(name: str) -> None:
    tokenizer = BOUNDED[name]()
    bound = find_bound(tokenizer)
    assert bound is not None

    @settings(max_examples=60, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)

    check()
    assert bound.least_tokens("x" * 10_000) > 10_000 / 100


def test_the_longest_token_counts() -> None:
    tokenizer = tokenizers_zoo.byte_level()
    tokenizer.add_tokens(["x" * 40])
    assert find_bound(tokenizer) == LengthBound(40)
    assert LengthBound(40).least_tokens("x" * 81) == 3


def test_spaces_that_a_token_takes_with_it_are_not_counted() -> None:
    bound = find_bound(swallowing())
    assert bound is not None
    assert bound.least_tokens(" \n\u2003" * 1000 + "q") == 1


def with_normalizer(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = tokenizers_zoo.byte_level()
    tokenizer.normalizer = normalizer
    return tokenizer


def split_with(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = tokenizers_zoo.byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.ByteLevel(use_regex=False)])
    return tokenizer


UNBOUNDED = {
    "metaspace": tokenizers_zoo.metaspace,  # turns a run of unknown characters into one token
    "word-piece": tokenizers_zoo.word_piece,
    "strips": lambda: with_normalizer(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
    "shortens": lambda: with_normalizer(normalizers.Replace("  ", " ")),
    "drops spaces": lambda: split_with(pre_tokenizers.WhitespaceSplit()),
    "drops what it splits at": lambda: split_with(pre_tokenizers.Split(" ", "removed")),
    "lacks bytes": lambda: Tokenizer(models.BPE({"a": 0}, [])),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizers_that_lose_characters_have_no_bound(name: str) -> None:
    assert find_bound(UNBOUNDED[name]()) is None
