"""Byte-pair encoding (arXiv:1508.07909) of long words, for tokenizers in Python whose own loop takes quadratic time."""

import heapq
import random
from collections.abc import Callable
from typing import Any

from quire.core.errors import ParameterError

SHORT_WORD = 64  # characters that the tokenizer's own code merges soon enough
LONGEST_WORD = 2048
"""Characters of a word where only the tokenizer's own loop knows the tokens."""
_MAX_REMEMBERED = 2**16
_NUM_TRIALS = 8
_FORMS = (("@@ ", "</w>"), (" ", "</w>"), (" ", ""))
"""Between symbols in an answer, and at a word's end while it is merged: CTRL's, XLM's, and GPT-2's of bytes."""


class PairMerger:
    """Computes the `bpe` of CTRL's tokenizer and similar ones, in time n log n for a word of n characters.

    As there, all occurrences of the pair of least rank are merged, from left to right, before the next pair is chosen.

    Args:
        ranks: of each pair of symbols that may be merged. Other symbols are characters, the last one with `end`.
        joint: between symbols in the answer. If it has a mark of its own, `end` is left out.
        end: what marks the end of a word.
        own: the tokenizer's `bpe`, for short words.
    """

    def __init__(self, ranks: dict[tuple[str, str], int], joint: str, end: str, own: Callable[[str], str]) -> None:
        self._ranks = ranks
        self._joint = joint
        self._end = end
        self._own = own

    def __call__(self, word: str) -> str:
        if len(word) <= SHORT_WORD:
            return self._own(word)
        merged = self._joint.join(self.symbols(word))
        return merged.removesuffix(self._end) if self._joint.strip() else merged

    def symbols(self, word: str) -> list[str]:
        """The word's symbols when no pair is left to merge."""
        symbols = [*word[:-1], word[-1] + self._end]
        last = len(symbols) - 1
        before, after = list(range(-1, last)), list(range(1, last + 2))
        heap: list[tuple[int, int, str, str]] = []

        def offer(left: int) -> None:
            if left >= 0 and (right := after[left]) <= last:
                pair = (symbols[left], symbols[right])
                if (rank := self._ranks.get(pair)) is not None:
                    heapq.heappush(heap, (rank, left, *pair))

        for left in range(last):
            offer(left)
        while heap:
            rank, changed = heap[0][0], []
            while heap and heap[0][0] == rank:
                _, left, *pair = heapq.heappop(heap)
                right = after[left]
                if right > last or [symbols[left], symbols[right]] != pair:
                    continue  # one of the two was merged with another
                symbols[left] += symbols[right]
                symbols[right] = ""
                after[left] = after[right]
                if after[left] <= last:
                    before[after[left]] = left
                changed.append(left)
            for left in {*changed, *(before[left] for left in changed)}:
                offer(left)
        return [symbol for symbol in symbols if symbol]


class _BoundedCache(dict[str, str]):
    """A cache of words with a limit: requests bring new words without end."""

    def __setitem__(self, word: str, merged: str) -> None:
        if len(self) < _MAX_REMEMBERED:
            super().__setitem__(word, merged)


def quicken(tokenizer: Any) -> Callable[[str], None]:
    """Replaces a tokenizer's quadratic `bpe` for long words, if both give the same results for random words.

    Returns:
        A check of a text, which raises ParameterError if one of its words would take too long.
    """
    ranks, own = getattr(tokenizer, "bpe_ranks", None), getattr(tokenizer, "bpe", None)
    if not isinstance(ranks, dict) or not callable(own) or not isinstance(getattr(tokenizer, "cache", None), dict):
        return lambda text: None
    tokenizer.cache = _BoundedCache(tokenizer.cache)  # some begin with special tokens, which stay whole
    try:
        expected = {word: own(word) for word in _words(ranks)}
    except Exception:  # a checkpoint's own code, in which these names mean something else
        return lambda text: None
    for merger in (PairMerger(ranks, joint, end, own) for joint, end in _FORMS):
        if all(merger(word) == merged for word, merged in expected.items()):
            tokenizer.bpe = merger
            return lambda text: None
    return _check_words


def _words(ranks: dict[tuple[str, str], int]) -> list[str]:
    """Long words of symbols that are merged, and of characters that a tokenizer may treat in its own way."""
    draw, symbols = random.Random(0), sorted({"x", *(symbol.removesuffix("</w>") for pair in ranks for symbol in pair)})
    pieces = [symbols, symbols, symbols, [*"AZ.,!?()'\"-09é"]]
    return ["".join(draw.choice(draw.choice(pieces)) for _ in range(2 * SHORT_WORD)) for _ in range(_NUM_TRIALS)]


def _check_words(text: str) -> None:
    longest = max(map(len, text.split()), default=0)
    if longest > LONGEST_WORD:
        raise ParameterError(
            f"The text has a word of {longest} characters, and this model's tokenizer takes quadratic time for a word; "
            f"at most {LONGEST_WORD} are tokenized. Put spaces between its parts, or send token ids.",
            param="prompt",
        )
