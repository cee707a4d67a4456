"""Log-probabilities as the engine sends them, as the rows that readers get."""

from collections.abc import Callable

from quire.core.wire.protocol import PromptLogprobs, TokenLogprobs
from quire.frontend.outputs import Logprob

TokenText = Callable[[int], str | None]


def read_row(position: TokenLogprobs, text_of: TokenText) -> dict[int, Logprob]:
    """One position's log-probabilities by token id, its own token first.

    Tokens that the request named have no rank: only that of the position's own token is known.
    """
    token_ids = position.token_ids
    ranks: list[int | None] = [position.nth_likeliest]
    ranks += range(1, len(token_ids)) if position.by_likelihood else [None] * (len(token_ids) - 1)
    row: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(token_ids, position.logprobs, ranks, strict=True):
        if token_id not in row:  # the first token comes up again when it is one of the likeliest
            row[token_id] = Logprob(logprob, rank, text_of(token_id))
    return row


class PromptRows:
    """A prompt's log-probabilities, an entry per token; they come in parts, and again when the engine starts over."""

    def __init__(self, num_prompt_tokens: int, text_of: TokenText) -> None:
        self.rows: list[dict[int, Logprob] | None] = [None] * num_prompt_tokens  # the first token never has any
        self._num_missing = num_prompt_tokens - 1
        self._text_of = text_of

    @property
    def complete(self) -> bool:
        return not self._num_missing

    def add(self, part: PromptLogprobs) -> None:
        """Takes the next part."""
        for place, position in enumerate(part.positions, start=part.start):
            self._num_missing -= self.rows[place] is None
            self.rows[place] = read_row(position, self._text_of)
