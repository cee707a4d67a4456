"""Long words, merged by us and by the tokenizers' own loops."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ParameterError
from quire.frontend.text.pair_merging import LONGEST_WORD, quicken
from quire.frontend.text.python_backend import PythonBackend
from tests.frontend.text import python_tokenizers
from tests.frontend.text.python_tokenizers import OF_TRANSFORMERS

_LETTERS = "abcde"


class Counted(dict[tuple[str, str], int]):
    num_looked_up = 0

    def get(self, *args):  # type: ignore[no-untyped-def]
        self.num_looked_up += 1
        return super().get(*args)


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many, in an order that no training finds: what two symbols make may be merged before them."""
    draw, symbols = random.Random(3), [*_LETTERS]
    pairs: dict[tuple[str, str], None] = {}
    while len(pairs) < 400:
        first, second = draw.choice(symbols), draw.choice(symbols)
        if (first, second) not in pairs and len(first + second) < 7:
            pairs[first, second] = None
            symbols.append(first + second)
    ends = [(draw.choice(symbols), draw.choice(symbols) + "</w>") for _ in range(40)]
    shuffled = [*pairs, *ends]
    draw.shuffle(shuffled)
    monkeypatch.setattr(python_tokenizers, "_MERGES", shuffled)


@pytest.mark.parametrize("name", ["CTRLTokenizer", "BioGptTokenizer", "XLMTokenizer"])
def test_long_words_have_the_same_tokens_in_less_than_quadratic_time(name: str, merges: None, tmp_path: Path) -> None:
    OF_TRANSFORMERS[name](tmp_path)
    import transformers

    theirs, ours = (transformers.AutoTokenizer.from_pretrained(tmp_path) for _ in range(2))
    ranks = ours.bpe_ranks = Counted(ours.bpe_ranks)
    theirs.cache["abc"] = ours.cache["abc"] = "a b"
    backend, draw = PythonBackend(ours), random.Random(5)
    assert backend.encode("abc", True) == theirs.encode("abc")
    for length in (1, 2, 64, 65, 66, 300, 1000):
        word = "".join(draw.choices(_LETTERS, k=length))
        for text in (word, f"{word}, {word[::-1]}\n{'a' * length}?!"):
            assert backend.encode(text, True) == theirs.encode(text)
    ranks.num_looked_up = 0
    word = "".join(draw.choices(_LETTERS, k=20_000))
    assert len(backend.encode(word, False)) < 20_000
    assert ranks.num_looked_up < 4 * 20_000


def test_words_that_only_a_quadratic_loop_can_merge_have_a_limit(merges: None, tmp_path: Path) -> None:
    """The class splits and rewrites words before it merges."""
    OF_TRANSFORMERS["BlenderbotSmallTokenizer"](tmp_path)
    import transformers

    theirs, ours = (transformers.AutoTokenizer.from_pretrained(tmp_path) for _ in range(2))
    backend, word = PythonBackend(ours), "a!" * 100
    assert backend.encode(word, True) == theirs.encode(word)
    assert backend.encode("a " * LONGEST_WORD, True)
    with pytest.raises(ParameterError, match=f"has a word of {LONGEST_WORD + 1} characters"):
        backend.encode("a" * (LONGEST_WORD + 1), True)


class OwnCode:
    """A tokenizer of a checkpoint, whose merges `bpe` takes or refuses as `loop` does."""

    def __init__(self, ranks: dict[Any, int], loop: Callable[..., str]) -> None:
        self.bpe_ranks, self.bpe, self.cache = ranks, loop, dict[str, str]()


def test_words_of_bytes_have_no_mark_at_their_end() -> None:
    """As GPT-2's, in which a text without spaces is one word."""
    ranks = {("a", "b"): 1, ("ab", "ab"): 0, ("b", "c"): 2}
    tokenizer = OwnCode(ranks, lambda word: " ".join(_merge_slowly(word, ranks)))
    check = quicken(tokenizer)
    text = "abcab" * LONGEST_WORD
    check(text)
    assert tokenizer.bpe(text[:1000]) == " ".join(_merge_slowly(text[:1000], ranks))


def _merge_slowly(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    symbols = [*word]
    while pairs := [pair for pair in itertools.pairwise(symbols) if pair in ranks]:
        first, second = min(pairs, key=lambda pair: ranks[pair])
        merged: list[str] = []
        for symbol in symbols:
            if merged and (merged[-1], symbol) == (first, second):
                merged[-1] += symbol
            else:
                merged.append(symbol)
        symbols = merged
    return symbols


@pytest.mark.parametrize(
    "tokenizer",
    [
        OwnCode({(b"a", b"b"): 0}, lambda word: word),
        OwnCode({("a", "b"): 0}, lambda word, more: word + more),
    ],
)
def test_code_in_which_the_names_mean_something_else_is_left_alone(tokenizer: OwnCode) -> None:
    loop = tokenizer.bpe
    quicken(tokenizer)("a" * (LONGEST_WORD + 1))
    assert tokenizer.bpe is loop
