"""Log-probabilities in the two shapes of OpenAI's API."""

from collections.abc import Sequence

from quire.frontend.openai.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from quire.frontend.outputs import Logprob
from quire.frontend.text.token_texts import texts_after
from quire.frontend.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""JSON has no -inf."""


class LogprobFormatter:
    """Spells tokens and picks the likeliest.

    Args:
        tokenizer: None when only ids are known.
        num_top: number of the likeliest tokens to show; -1 shows all.
        as_ids: spell tokens `token_id:123`, because several tokens may have equal text.
    """

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids or tokenizer is None

    def chat(self, rows: Sequence[dict[int, Logprob]]) -> ChatLogprobs:
        """One entry per token. A row holds the sampled token first."""
        content = []
        for row in rows:
            sampled = next(iter(row))
            top = [TopLogprob(self._text(i, row[i]), _finite(row[i]), self._bytes(i, row[i])) for i in self._top(row)]
            entry = row[sampled]
            content.append(TokenLogprob(self._text(sampled, entry), _finite(entry), self._bytes(sampled, entry), top))
        return ChatLogprobs(content)

    def completion(
        self, rows: Sequence[dict[int, Logprob] | None], offset: int, *, first_id: int | None = None
    ) -> CompletionLogprobs:
        """Columns of one entry per token; `offset` is the first character of the first token's text.

        `top_logprobs` always include the sampled token, likely or not. A row of None is the first token of an echoed
        prompt, `first_id`, which has no probability.
        """
        out = CompletionLogprobs([], [], [], [])
        for row in rows:
            out.text_offset.append(offset)
            if row is None:
                assert first_id is not None
                token = self._first_text(first_id)
                out.token_logprobs.append(None)
                out.tokens.append(token)
                out.top_logprobs.append(None)
                offset += len(token)
                continue
            sampled = next(iter(row))
            token = self._text(sampled, row[sampled])
            out.token_logprobs.append(_finite(row[sampled]))
            out.tokens.append(token)
            shown: dict[str, float] = {}
            for token_id in (sampled, *self._top(row)):  # the first of several tokens of equal text is kept
                shown.setdefault(self._text(token_id, row[token_id]), _finite(row[token_id]))
            out.top_logprobs.append(shown)
            offset += len(token)
        return out

    def _top(self, row: dict[int, Logprob]) -> list[int]:
        """Ids of the likeliest tokens, best first; all ids of a row when the request named the tokens that it wants."""
        if any(entry.rank is None for entry in row.values()):
            return list(row)
        limit = len(row) if self._num_top < 0 else self._num_top
        ranked = sorted((entry.rank or 0, token_id) for token_id, entry in row.items())
        return [token_id for rank, token_id in ranked if rank <= limit]

    def _text(self, token_id: int, entry: Logprob) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id) if entry.decoded_token is None else entry.decoded_token

    def _first_text(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return texts_after(self._tokenizer, []).text(token_id)

    def _bytes(self, token_id: int, entry: Logprob) -> list[int]:
        """The token's bytes, which may be a part of a character. The bytes of all tokens make the text."""
        if self._tokenizer is None:
            return []
        if self._tokenizer.spells_bytes or entry.decoded_token is None:
            return list(self._tokenizer.piece(token_id))
        return list(entry.decoded_token.encode())


def prompt_logprobs(rows: Sequence[dict[int, Logprob] | None] | None) -> list[dict[int, Logprob] | None] | None:
    """A prompt's log-probabilities by token id, as an answer spells them."""
    if rows is None:
        return None
    for row in rows:
        for entry in (row or {}).values():
            entry.logprob = _finite(entry)
    return list(rows)


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)
