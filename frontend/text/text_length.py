"""A lower bound on the number of a text's tokens, from its length: a text that cannot fit is refused untokenized.

No token has more characters than the vocabulary's longest token. So the length of a text bounds the number of its
tokens, if the tokenizer drops no characters. The tokenizer's steps are inspected; if one is unknown, there is no bound.
"""

import json
from typing import Any, NamedTuple

import tokenizers

_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))

_NORMALIZERS = {"Prepend": 1, "NFD": 1, "NFKD": 1, "Lowercase": 1, "NFC": 4, "NFKC": 4}
"""Normalizers that drop no characters, and the most characters that each composes into one (by Unicode)."""

_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}


class LengthBound(NamedTuple):
    """The greatest length of a token's text.

    `takes_spaces`: some tokens absorb all adjacent white space, which `characters_per_token` does not count.
    """

    characters_per_token: int
    takes_spaces: bool = False

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of `text`'s tokens."""
        num_characters = len(text)
        if self.takes_spaces:
            num_characters -= sum(map(text.count, _SPACES))
        return -(-num_characters // self.characters_per_token)


def find_bound(backend: tokenizers.Tokenizer) -> LengthBound | None:
    """The bound for a tokenizer; None if it may turn any number of characters into one token or none."""
    composed = _most_composed(backend.normalizer)
    if composed is None or not _splits_only(backend.pre_tokenizer) or not _spells_all(backend):
        return None
    added = backend.get_added_tokens_decoder().values()
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    return LengthBound(longest * composed, any(token.lstrip or token.rstrip for token in added))


def _most_composed(normalizer: Any) -> int | None:
    """The most characters that a normalizer composes into one; None if it may drop characters."""
    most = 1
    for step in _steps(normalizer, "normalizers"):
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if not pattern or len(step["content"]) < len(pattern):
                return None
        elif step["type"] in _NORMALIZERS:
            most *= _NORMALIZERS[step["type"]]
        else:
            return None
    return most


def _splits_only(pre_tokenizer: Any) -> bool:
    """True if a pre-tokenizer only splits, so that each character is in one of the pieces."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    return all(step["type"] in _PRE_TOKENIZERS and step.get("behavior") != "Removed" for step in steps)


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, in order."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps = state[key] if state["type"] == "Sequence" else [state]
    return [inner for step in steps for inner in (step.get(key) or [step])]


def _spells_all(backend: tokenizers.Tokenizer) -> bool:
    """True if each character that is no token becomes byte tokens, or one token alone."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if any(step["type"] == "ByteLevel" for step in _steps(backend.pre_tokenizer, "pretokenizers")):
        return all(backend.token_to_id(symbol) is not None for symbol in tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if model.byte_fallback and all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
        return True
    return model.unk_token is not None and not model.fuse_unk
