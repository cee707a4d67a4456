"""How the tokens of a vocabulary spell bytes."""

import functools
import itertools
from collections.abc import Iterable
from typing import Literal

PieceKind = Literal["byte_level", "byte_fallback", "other", "rewritten"]
"""How tokens become text: tokens are bytes (GPT-2), or text with byte tokens (Llama 2), or neither. Where it is
rewritten, a token may change the text of those before it."""


@functools.cache
def symbols_of_bytes() -> tuple[str, ...]:
    """GPT-2's alphabet, by byte: printable Latin-1 characters are themselves, others U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@functools.cache
def _byte_of_symbol() -> dict[str, int]:
    return {symbol: byte for byte, symbol in enumerate(symbols_of_bytes())}


def byte_level_piece(token: str) -> bytes:
    """The bytes of a token that is written in GPT-2's alphabet; of any other, its text."""
    symbols = _byte_of_symbol()
    try:
        return bytes([symbols[character] for character in token])
    except KeyError:  # an added token, whose bytes are its text
        return token.encode()


def fallback_byte(token: str) -> int | None:
    """The byte of `<0xAB>`; None for every other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def byte_fallback_piece(token: str) -> bytes:
    """The bytes of a token of SentencePiece's, whose `▁` is a space."""
    byte = fallback_byte(token)
    return token.replace("▁", " ").encode() if byte is None else bytes([byte])


def byte_level_text(tokens: Iterable[str]) -> str:
    """The text of tokens that are bytes."""
    return b"".join(map(byte_level_piece, tokens)).decode("utf-8", "replace")


def byte_fallback_text(tokens: Iterable[str], stripped_spaces: int) -> str:
    """The text of tokens of SentencePiece's; one invalid byte turns all adjacent byte tokens into U+FFFD."""
    text = ""
    for is_bytes, run in itertools.groupby(tokens, lambda token: fallback_byte(token) is not None):
        joined = b"".join(map(byte_fallback_piece, run))
        try:
            text += joined.decode()
        except UnicodeDecodeError:
            assert is_bytes
            text += "\N{REPLACEMENT CHARACTER}" * len(joined)
    kept = text[:stripped_spaces].lstrip(" ")
    return kept + text[stripped_spaces:]
