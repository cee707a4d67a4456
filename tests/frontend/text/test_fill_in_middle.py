"""Fill-in-the-middle prompts for every model family's tokens, and truncation of prompts."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from quire.core.errors import ParameterError
from quire.frontend.text.fast_backend import FastBackend
from quire.frontend.text.fill_in_middle import AFTER, BEFORE, FORMATS, Format, fill_in_middle, find_format
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.text.truncation import AddedTokens, Side, Truncation
from tests.frontend.text import tokenizers_zoo


def tokenizer_with(tokens: list[str], **special_tokens: str) -> Tokenizer:
    backend = tokenizers_zoo.byte_level()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return Tokenizer(FastBackend(backend), special_tokens=special_tokens, chat_templates={}, folder=Path("nowhere"))


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda each: each.tokens[0])
def test_each_family_is_known_by_its_tokens(chosen: Format) -> None:
    tokenizer = tokenizer_with(chosen.tokens)
    assert find_format(tokenizer) == chosen
    before, after = "def add(", "\n    return x"
    ids = fill_in_middle(tokenizer, before, after)
    texts = {BEFORE: before, AFTER: after}
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(texts.get(part, part) for part in chosen.parts)
    special = [tokenizer.token_id(token) for token in chosen.tokens]
    assert [token_id for token_id in ids if token_id in tokenizer.special_token_ids] == special
    assert fill_in_middle(tokenizer, tokenizer.encode(before), after) == ids


def test_nothing_may_stand_before_the_gap() -> None:
    tokenizer = tokenizer_with(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    ids = fill_in_middle(tokenizer, "", "b")
    assert ids == [tokenizer.token_id("<fim_prefix>"), tokenizer.token_id("<fim_suffix>"), *tokenizer.encode("b"),
                   tokenizer.token_id("<fim_middle>")]  # fmt: skip


def test_a_vocabulary_without_such_tokens_refuses() -> None:
    assert find_format(tokenizer_with(["<fim_prefix>", "<fim_suffix>"])) is None
    with pytest.raises(ParameterError, match="fill-in-the-middle tokens") as caught:
        fill_in_middle(tokenizer_with([]), "a", "b")
    assert caught.value.param == "suffix"


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(3), [7, 8, 9]),
        (Truncation(3, "left"), [7, 8, 9]),
        (Truncation(3, "right"), [0, 1, 2]),
        (Truncation(-1), [2, 3, 4, 5, 6, 7, 8, 9]),
        (Truncation(-1, "right"), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Truncation(8), [2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_what_is_kept_of_a_prompt(truncation: Truncation, kept: list[int]) -> None:
    assert truncation.apply(list(range(10)), room=8, rule="all that fit") == kept


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("num_tokens", [2, 3, 5, 9])
@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>", "$A </s>", "$A"])
def test_a_text_is_cut_as_the_library_cuts_it(num_tokens: int, single: str, side: Side) -> None:
    """vLLM has the `tokenizers` library cut texts, which leaves the tokens that it adds."""
    library = tokenizers.Tokenizer(WordLevel({"<s>": 0, "</s>": 1, **{word: 2 + ord(word) for word in "abcdefg"}}))
    library.pre_tokenizer = Whitespace()
    library.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    token_ids, alone = library.encode("a b c d e f g").ids, library.encode("").ids
    library.enable_truncation(num_tokens, direction=side)
    kept = Truncation(num_tokens, text_side=side).apply(
        token_ids, room=10, rule="all that fit", added=AddedTokens.of(token_ids, alone)
    )
    assert kept == library.encode("a b c d e f g").ids


@pytest.mark.parametrize("num_tokens", [0, -2, 9])
def test_what_cannot_be_kept(num_tokens: int) -> None:
    with pytest.raises(ParameterError) as caught:
        Truncation(num_tokens).apply([1], room=8, rule="all that fit")
    assert caught.value.param == "truncate_prompt_tokens"
