"""Turns the engine's log-probabilities into the rows that readers get."""

from collections.abc import Callable

from quire.core.wire.protocol import PromptLogprobs, TokenLogprobs
from quire.frontend.outputs import Logprob

TokenText = Callable[[int], str | None]


def read_row(position: TokenLogprobs, text_of: TokenText) -> dict[int, Logprob]:
    """One position's log-probabilities by token id, its own token first.

    Tokens that the request named have no rank: the engine sends only the rank of the position's own token.
    """
    token_ids = position.token_ids
    ranks: list[int | None] = [position.nth_likeliest]
    ranks += range(1, len(token_ids)) if position.by_likelihood else [None] * (len(token_ids) - 1)
    row: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(token_ids, position.logprobs, ranks, strict=True):
        if token_id not in row:  # the position's own token may come again among the likeliest
            row[token_id] = Logprob(logprob, rank, text_of(token_id))
    return row


class PromptRows:
    """A prompt's log-probabilities, an entry per token. They come in parts; a restarted engine sends them again.

    Args:
        num_named: tokens that the request named at each position; their values are the last of each row.
    """

    def __init__(self, num_prompt_tokens: int, text_of: TokenText, num_named: int = 0) -> None:
        self.rows: list[dict[int, Logprob] | None] = [None] * num_prompt_tokens  # the first token never has an entry
        self.named: list[list[float]] = [[]] * (num_prompt_tokens - 1)  # by position, for the token after it
        self._num_missing = num_prompt_tokens - 1
        self._text_of = text_of
        self._num_named = num_named

    @property
    def complete(self) -> bool:
        return not self._num_missing

    def add(self, part: PromptLogprobs) -> None:
        """Takes the next part."""
        for place, position in enumerate(part.positions, start=part.start):
            if self._num_named:
                self.named[place - 1] = position.logprobs[-self._num_named :]
                del position.logprobs[-self._num_named :], position.token_ids[-self._num_named :]
            self._num_missing -= self.rows[place] is None
            self.rows[place] = read_row(position, self._text_of)
