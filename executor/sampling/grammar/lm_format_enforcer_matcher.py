"""lm-format-enforcer: a character parser in Python, walked along a tree of the vocabulary; the slowest of the four."""

import dataclasses
from functools import partial
from typing import Any

import msgspec
import numpy as np
from lmformatenforcer import CharacterLevelParser, JsonSchemaParser, RegexParser, StringParser, UnionParser
from lmformatenforcer.tokenenforcer import TokenEnforcer, TokenEnforcerTokenizerData

from quire.core.wire.protocol import Vocabulary
from quire.executor.sampling.grammar.matcher import Matcher


class LMFormatEnforcerLoader:
    """Data is [kind, text, max_whitespace] in MessagePack; the last bounds the characters between two tokens of JSON.

    Tokens that are parts of characters are never chosen.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = [(token_id, text) for token_id, piece in enumerate(vocabulary.tokens) if (text := _text(piece))]
        self._data = TokenEnforcerTokenizerData(
            [(token_id, text, False) for token_id, text in tokens],
            partial(_decode, dict(tokens)),
            vocabulary.end_token_ids,
            use_bitmask=False,
            vocab_size=len(vocabulary.tokens),
        )

    def load(self, data: bytes) -> Any:
        return msgspec.msgpack.decode(data, type=tuple[str, str, int])

    def matcher(self, loaded: Any) -> "LMFormatEnforcerMatcher":
        kind, text, max_whitespace = loaded
        parser = make_parser(kind, text)
        enforcer = TokenEnforcer(self._data, parser)  # gives the parser its own config
        parser.config = dataclasses.replace(parser.config, max_consecutive_whitespaces=max_whitespace)
        return LMFormatEnforcerMatcher(enforcer)


class LMFormatEnforcerMatcher(Matcher):
    def __init__(self, enforcer: TokenEnforcer) -> None:
        self._enforcer = enforcer
        self._tokens: list[int] = []
        self._enforcer.get_allowed_tokens(self._tokens)  # each call builds on the one before

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        allowed = np.asarray(self._enforcer.get_allowed_tokens(self._tokens).allowed_tokens, np.int64)
        bits = np.zeros(bitmask.shape[1] * 32, np.uint8)
        bits[allowed] = 1
        bitmask[row] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        if not self._enforcer.get_allowed_tokens(self._tokens).is_token_allowed(token_id):
            return False
        self._tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self._tokens[len(self._tokens) - num_tokens :]


def make_parser(kind: str, text: str) -> CharacterLevelParser:
    """The parser of a JSON schema, a regular expression, or a JSON list of choices."""
    if kind == "json":
        return JsonSchemaParser(msgspec.json.decode(text))
    if kind == "regex":
        return RegexParser(text)
    return UnionParser([StringParser(choice) for choice in msgspec.json.decode(text)])


def _text(piece: bytes) -> str:
    """The token as text; empty for parts of characters, and for control characters, which it would put into JSON."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return ""
    return "" if any(character < " " and character not in "\n\r\t" for character in text) else text


def _decode(texts: dict[int, str], token_ids: list[int]) -> str:
    return "".join(texts.get(token_id, "") for token_id in token_ids)
