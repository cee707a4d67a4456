"""lm-format-enforcer: a character parser in Python, walked along a tree of the vocabulary; the slowest of the four."""

import dataclasses
from functools import partial
from typing import Any

import msgspec
import numpy as np
from lmformatenforcer import (
    CharacterLevelParser,
    JsonSchemaParser,
    RegexParser,
    StringParser,
    UnionParser,
    jsonschemaparser,
)
from lmformatenforcer.tokenenforcer import TokenEnforcer, TokenEnforcerTokenizerData

from quire.core.wire.protocol import Vocabulary
from quire.executor.sampling.grammar.matcher import Matcher


class LMFormatEnforcerLoader:
    """Data is [kind, text, max_whitespace] in MessagePack; the last bounds the characters between two tokens of JSON.

    Tokens that are parts of characters are never chosen.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._trees: dict[bool, TokenEnforcerTokenizerData] = {}  # by whether they are for JSON

    def load(self, data: bytes) -> Any:
        return msgspec.msgpack.decode(data, type=tuple[str, str, int])

    def matcher(self, loaded: Any) -> "LMFormatEnforcerMatcher":
        kind, text, max_whitespace = loaded
        parser = make_parser(kind, text)
        enforcer = TokenEnforcer(self._tree(kind == "json"), parser)  # gives the parser its own config
        alphabet = parser.config.alphabet
        if isinstance(parser, JsonSchemaParser):  # within strings, JSON escapes line feeds, and strings are not ASCII
            alphabet = alphabet.replace("\n", "").replace("\r", "")
            parser.context.alphabet_without_quotes = alphabet.replace('"', "")
        parser.config = dataclasses.replace(
            parser.config, alphabet=alphabet, max_consecutive_whitespaces=max_whitespace
        )
        return LMFormatEnforcerMatcher(enforcer)

    def _tree(self, is_json: bool) -> TokenEnforcerTokenizerData:
        """The tokens as a tree. Those for JSON have no tabs, which the library would let into strings."""
        if is_json not in self._trees:
            texts = {token_id: _text(piece) for token_id, piece in enumerate(self._vocabulary.tokens)}
            texts = {token_id: text for token_id, text in texts.items() if text and not (is_json and "\t" in text)}
            self._trees[is_json] = TokenEnforcerTokenizerData(
                [(token_id, text, False) for token_id, text in texts.items()],
                partial(_decode, texts),
                self._vocabulary.end_token_ids,
                use_bitmask=False,
                vocab_size=len(self._vocabulary.tokens),
            )
        return self._trees[is_json]


class _String(jsonschemaparser.StringParsingState):
    """A string that may begin with spaces: the library takes them for spaces before the string, and counts none."""

    def add_character(self, new_character: str) -> Any:
        is_within = self.require_opening_quote and self.seen_opening_quote and not self.seen_closing_quote
        if new_character != " " or self.parsed_string or not is_within:
            return super().add_character(new_character)
        added = self._clone()
        added.parsed_string = new_character
        if added.regex_parser:
            added.regex_parser = added.regex_parser.add_character(new_character)
        return added


jsonschemaparser.StringParsingState = _String


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
