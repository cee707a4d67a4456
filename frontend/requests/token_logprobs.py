"""Turns the engine's log-probabilities into the rows that readers get."""

from collections.abc import Sequence

from quire.core.wire.row_outputs import PromptLogprobs, TokenLogprobs
from quire.frontend.outputs import Logprob
from quire.frontend.text.token_texts import TokenTexts, texts_after
from quire.frontend.text.tokenizer import Tokenizer


class RowReader:
    """Reads rows of log-probabilities of one sequence after the other, its own token first.

    Args:
        tokenizer: None for rows without text.
        token_ids: the tokens before the first row.
    """

    __slots__ = ("_texts",)

    def __init__(self, tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> None:
        self._texts: TokenTexts | None = None if tokenizer is None else texts_after(tokenizer, token_ids)

    def read(self, position: TokenLogprobs, *, is_last: bool = False) -> dict[int, Logprob]:
        """The next position's log-probabilities by token id.

        Tokens that the request named have no rank: the engine sends only the rank of the position's own token.

        Args:
            is_last: the sequence ends with this token, so a character stays incomplete.
        """
        token_ids = position.token_ids
        ranks: list[int | None] = [position.nth_likeliest]
        ranks += range(1, len(token_ids)) if position.by_likelihood else [None] * (len(token_ids) - 1)
        row: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(token_ids, position.logprobs, ranks, strict=True):
            if token_id not in row:  # the position's own token may come again among the likeliest
                row[token_id] = Logprob(logprob, rank)
        self.spell(row, is_last=is_last)
        return row

    def spell(self, row: dict[int, Logprob], *, is_last: bool = False) -> None:
        """Adds the texts of a row's tokens. The row is the next position's, as `read` makes it."""
        texts = self._texts
        if texts is None:
            return
        own = next(iter(row))
        for token_id, entry in row.items():
            entry.decoded_token = texts.text(token_id)
        texts.advance(own)
        if is_last and (rest := texts.rest()):
            row[own].decoded_token = f"{row[own].decoded_token}{rest}"


class PromptRows:
    """A prompt's log-probabilities, an entry per token. They come in parts; a restarted engine sends them again.

    Args:
        tokenizer: None for rows without text.
        num_named: tokens that the request named at each position; their values are the last of each row.
    """

    def __init__(self, prompt_token_ids: list[int], tokenizer: Tokenizer | None, num_named: int = 0) -> None:
        num_tokens = len(prompt_token_ids)
        self.rows: list[dict[int, Logprob] | None] = [None] * num_tokens  # the first token never has an entry
        self.named: list[list[float]] = [[]] * (num_tokens - 1)  # by position, for the token after it
        self._num_missing = num_tokens - 1
        self._prompt_token_ids = prompt_token_ids
        self._tokenizer = tokenizer
        self._num_named = num_named

    @property
    def complete(self) -> bool:
        return not self._num_missing

    def add(self, part: PromptLogprobs) -> None:
        """Takes the next part."""
        reader = RowReader(self._tokenizer, self._prompt_token_ids[: part.start])
        for place, position in enumerate(part.positions, start=part.start):
            if self._num_named:
                self.named[place - 1] = position.logprobs[-self._num_named :]
                del position.logprobs[-self._num_named :], position.token_ids[-self._num_named :]
            self._num_missing -= self.rows[place] is None
            self.rows[place] = reader.read(position)
