"""Two texts as one input of a model: the tokens, and which of them are the second text's."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

PairCut = Callable[[int, int, int], tuple[int, int]]
"""Maps the numbers of tokens of the first text, of the second, and of special ones to those kept of both texts."""


class PairTokens(NamedTuple):
    """Token ids of two texts as one input, and the type of each: 0, or 1 as the model's second text."""

    token_ids: list[int]
    types: list[int]

    @property
    def second_text_types(self) -> list[int] | None:
        """The types; None where no token is of the second text by its type."""
        return self.types if any(self.types) else None

    def part(self, kept: Callable[[list[int]], list[int]]) -> "PairTokens":
        """The tokens that `kept` keeps of a list with one entry for each."""
        return PairTokens(kept(self.token_ids), kept(self.types))


class PairLimits(NamedTuple):
    """The most tokens of either text, and of the whole input; None: no limit.

    An input that is too long loses tokens of its longer text first, from the end, as in the `tokenizers` library.
    """

    first: int | None = None
    second: int | None = None
    whole: int | None = None

    def cut(self, first: int, second: int, special: int) -> tuple[int, int]:
        """The numbers of tokens to keep, a `PairCut`."""
        first = first if self.first is None else min(first, self.first)
        second = second if self.second is None else min(second, self.second)
        if self.whole is None or first + second + special <= self.whole:
            return first, second
        room = max(self.whole - special, 0)
        shorter, longer = sorted((first, second))
        if shorter <= room - shorter:
            longer = room - shorter
        else:
            shorter, longer = room // 2, room - room // 2
        return (shorter, longer) if first <= second else (longer, shorter)


def text_of_tokens(text: str, offsets: Sequence[tuple[int, int]], num_tokens: int) -> str:
    """The part of a text that its first tokens are of.

    Args:
        offsets: the begin and the end of each token in the text.
    """
    if len(offsets) <= num_tokens:
        return text
    return text[: min(offsets[num_tokens - 1][1], offsets[num_tokens][0])] if num_tokens else ""
