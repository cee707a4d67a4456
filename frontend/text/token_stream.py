"""Incremental detokenization: turns token ids into pieces of text, which joined are the text of all ids.

A token may be a part of a character, so text is held back until its characters are complete. The time per token does
not grow with the length of the text.
"""

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from quire.frontend.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8
_MAX_HELD_TOKENS = 64
"""Most tokens held back while their text ends in U+FFFD. A character has at most four bytes, so more are not one."""

_SETTLING_TOKENS = 4
"""Text is certain when so many tokens left it as it was. A character has at most so many bytes."""
_STEPS = 64


class TokenStream(Protocol):
    """The text of one sequence of tokens."""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the new text that is certain by now."""

    def flush(self) -> str:
        """Ends the text; returns the rest, with incomplete characters as U+FFFD."""


def open_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    shown_special_token_ids: Sequence[int] = (),
    spaces_between_special_tokens: bool = True,
) -> TokenStream:
    """A stream that continues the text of `prompt_token_ids`, and does not return that text.

    Args:
        skip_special_tokens: leave out special tokens, except `shown_special_token_ids`.
    """
    skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
    if shown_special_token_ids:
        skipped = skipped.difference(shown_special_token_ids)
    if tokenizer.kind == "byte_level":
        return ByteLevelStream(tokenizer, prompt_token_ids, skipped)
    if tokenizer.kind == "byte_fallback":
        return ByteFallbackStream(tokenizer, prompt_token_ids, skipped)
    if tokenizer.kind == "rewritten":
        return SettlingStream(tokenizer, prompt_token_ids, skipped)
    return WindowStream(tokenizer, prompt_token_ids, skipped, spaces_between_special_tokens)


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


class ByteLevelStream:
    """Tokens are byte strings, whose concatenation is decoded as UTF-8 (GPT-2, Llama 3, Qwen).

    If no character is incomplete, and the token's bytes are whole characters, the token's text is looked up. That is
    true of nine in ten tokens.
    """

    __slots__ = ("_decoder", "_piece", "_skipped", "_whole_texts", "_within_character")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._piece = tokenizer.piece
        self._whole_texts = tokenizer.whole_texts
        self._skipped = skipped
        self._decoder = _utf8_decoder()
        self._within_character = False
        tail = prompt_token_ids[-_CONTEXT_TOKENS:]
        if tail and (tail[-1] in skipped or not self._whole_texts[tail[-1]]):  # the prompt may end within a character
            for token_id in tail:
                self.push(token_id)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._within_character and (text := self._whole_texts[token_id]) is not None:
            return text
        text = self._decoder.decode(self._piece(token_id))
        self._within_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._within_character = False
        return self._decoder.decode(b"", final=True)


class ByteFallbackStream:
    """Tokens are text; characters without a token are runs of byte tokens (Llama 2, Gemma).

    A run is held back until it ends, because in this decoder one invalid byte turns every byte of its run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._run = bytearray()
        continues = any(tokenizer.piece(token_id) for token_id in prompt_token_ids if token_id not in skipped)
        self._spaces_to_strip = 0 if continues else tokenizer.stripped_spaces
        for token_id in prompt_token_ids[-_CONTEXT_TOKENS:]:
            self.push(token_id)
        decoder = _utf8_decoder()
        decoder.decode(bytes(self._run))
        self._run = bytearray(decoder.getstate()[0])  # complete characters belong to the prompt

    def push(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        if token_id in self._skipped or not piece:  # neither ends a run
            return ""
        if self._tokenizer.is_byte_token(token_id):
            self._run += piece
            return ""
        return self._strip(self._end_run() + piece.decode())

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _strip(self, text: str) -> str:
        """`text` without the leading spaces that the tokenizer adds at the start of a text."""
        if not self._spaces_to_strip or not text:
            return text
        stripped = text[: self._spaces_to_strip]
        kept = stripped.lstrip(" ")
        self._spaces_to_strip = 0 if kept else self._spaces_to_strip - len(stripped)
        return self._strip(kept + text[len(stripped) :])


class WindowStream:
    """Any other decoder (WordPiece, Metaspace, ...): decodes the last few tokens twice, and returns the difference."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skipped: frozenset[int],
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._glued = frozenset() if spaces_between_special_tokens else tokenizer.added_token_ids
        visible = (token_id for token_id in reversed(prompt_token_ids) if token_id not in skipped)
        self._context = list(islice(visible, _CONTEXT_TOKENS))[::-1]  # tokens whose text has been returned
        self._held: list[int] = []
        self._last: int | None = None

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        last, self._last = self._last, token_id
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        if text:
            self._context, self._held = self._held, []
        return text.removeprefix(" ") if last in self._glued and token_id in self._glued else text

    def flush(self) -> str:
        text = self._new_text() if self._held else ""
        self._held = []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class SettlingStream:
    """A decoder that may rewrite a text when a token comes (CTRL's `@@`, Moses): returns what the last tokens left.

    All of the text is decoded, because what a token does to it may depend on any before it: Moses counts quotes. A long
    text is decoded the less often, so that the time per token does not grow: n tokens come in steps of n / 64.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        visible = (token_id for token_id in reversed(prompt_token_ids) if token_id not in skipped)
        self._token_ids = list(islice(visible, _CONTEXT_TOKENS))[::-1]
        self._num_of_prompt = len(self._token_ids)
        self._next = self._num_of_prompt + _SETTLING_TOKENS  # the number of tokens at which they are decoded
        self._texts: dict[int, str] = {}  # of the first n tokens
        self._num_returned: int | None = None  # characters of the text; None: the prompt's may still change

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._token_ids.append(token_id)
        if len(self._token_ids) < self._next:
            return ""
        self._next = len(self._token_ids) + max(1, len(self._token_ids) // _STEPS)
        return self._return(self._num_settled())

    def flush(self) -> str:
        settled = self._return(self._num_settled())
        return settled + self._return(len(self._texts[len(self._token_ids)]))

    def _return(self, end: int) -> str:
        begin = end if self._num_returned is None else self._num_returned
        self._num_returned = max(begin, end)
        return self._texts[len(self._token_ids)][begin : self._num_returned]

    def _num_settled(self) -> int:
        """Number of characters that the texts with and without the last tokens begin with."""
        num_tokens = len(self._token_ids)
        lengths = range(max(self._num_of_prompt, num_tokens - _SETTLING_TOKENS), num_tokens + 1)
        self._texts = {each: self._texts[each] if each in self._texts else self._decode(each) for each in lengths}
        end = min(map(len, self._texts.values()))
        first, last = min(self._texts.values()), max(self._texts.values())  # what they share, those between do, too
        return next((i for i in range(self._num_returned or 0, end) if first[i] != last[i]), end)

    def _decode(self, num_tokens: int) -> str:
        return self._tokenizer.decode(self._token_ids[:num_tokens], skip_special_tokens=False)
