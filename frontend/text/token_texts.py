"""The text that each token adds to those before it, for log-probabilities: joined, the texts of a sequence's tokens.

A character of several tokens is the text of the token that completes it, and the others have none.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from quire.frontend.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8
_MAX_HELD_TOKENS = 64
"""Most tokens held back while their text ends in U+FFFD, as in a `TokenStream`."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenTexts(Protocol):
    """A place in a sequence of tokens."""

    def text(self, token_id: int) -> str:
        """The text that this token would add here."""

    def advance(self, token_id: int) -> None:
        """Goes on behind this token."""

    def rest(self) -> str:
        """The text of a character that the tokens so far leave incomplete, as U+FFFD."""


def texts_after(tokenizer: Tokenizer, token_ids: Sequence[int]) -> TokenTexts:
    """The place behind these tokens."""
    if tokenizer.spells_bytes:
        return _ByteTexts(tokenizer, token_ids)
    if tokenizer.kind == "rewritten":
        return _LoneTexts(tokenizer)
    return _WindowTexts(tokenizer, token_ids)


class _ByteTexts:
    """Tokens are bytes, or text with byte tokens. A special token is no part of a character around it."""

    __slots__ = ("_held", "_special", "_strips", "_tokenizer", "_whole_texts")

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_token_ids
        self._whole_texts = tokenizer.whole_texts
        self._held = b""
        self._strips = bool(tokenizer.stripped_spaces) and self._special.issuperset(token_ids)
        for token_id in token_ids[-_CONTEXT_TOKENS:]:
            self.advance(token_id)

    def text(self, token_id: int) -> str:
        text = None if self._held else self._whole_texts[token_id]
        if text is None:
            text, _ = self._read(token_id)
        if self._strips and token_id not in self._special:
            spaces = text[: self._tokenizer.stripped_spaces]
            return spaces.lstrip(" ") + text[len(spaces) :]
        return text

    def advance(self, token_id: int) -> None:
        if self._held or self._whole_texts[token_id] is None:
            _, self._held = self._read(token_id)
        self._strips = self._strips and token_id in self._special

    def rest(self) -> str:
        return self._held.decode("utf-8", "replace")

    def _read(self, token_id: int) -> tuple[str, bytes]:
        """The text with this token, and the bytes that begin a character behind it."""
        piece = self._tokenizer.piece(token_id)
        if token_id in self._special or not piece:
            return self._tokenizer.token_text(token_id), self._held
        if self._tokenizer.kind == "byte_fallback" and not self._tokenizer.is_byte_token(token_id):
            return _INCOMPLETE * len(self._held) + piece.decode("utf-8", "replace"), b""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(self._held + piece), decoder.getstate()[0]


class _WindowTexts:
    """Any other decoder (WordPiece, Metaspace, ...): decodes the last few tokens with and without the next one."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(token_ids[-_CONTEXT_TOKENS:])
        self._held: list[int] = []

    def text(self, token_id: int) -> str:
        text = self._behind_context([*self._held, token_id])
        return "" if text.endswith(_INCOMPLETE) and len(self._held) < _MAX_HELD_TOKENS else text

    def advance(self, token_id: int) -> None:
        added = self.text(token_id)
        self._held.append(token_id)
        if added:
            self._context, self._held = [*self._context, *self._held][-_CONTEXT_TOKENS:], []

    def rest(self) -> str:
        return self._behind_context(self._held)

    def _behind_context(self, token_ids: list[int]) -> str:
        decode = self._tokenizer.decode
        before = decode(self._context, skip_special_tokens=False)
        return decode(self._context + token_ids, skip_special_tokens=False)[len(before) :]


class _LoneTexts:
    """A decoder where later tokens change the text of earlier ones: each token's text is what it is alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = tokenizer.token_text

    def advance(self, token_id: int) -> None:
        pass

    def rest(self) -> str:
        return ""
