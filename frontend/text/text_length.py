"""The least number of tokens that a text can have, told by its length: what cannot fit is refused unread.

A token stands for no more characters than the vocabulary's longest has. That bounds a text only where no character is
lost on the way to the tokens, so what a tokenizer is made of is looked at, and there is no bound where that is unknown.
"""

import json
from typing import Any, NamedTuple

import tokenizers

_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))

_NORMALIZERS = {"Prepend": 1, "NFD": 1, "NFKD": 1, "Lowercase": 1, "NFC": 4, "NFKC": 4}
"""Those that lose nothing, and how many characters they make one of at most (Unicode's longest composition)."""

_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}


class LengthBound(NamedTuple):
    """How long the text of a token can be.

    `takes_spaces`: some tokens take all white space beside them, which is not counted in `characters_per_token`.
    """

    characters_per_token: int
    takes_spaces: bool = False

    def least_tokens(self, text: str) -> int:
        """No tokenization of `text` has fewer tokens than this."""
        num_characters = len(text)
        if self.takes_spaces:
            num_characters -= sum(map(text.count, _SPACES))
        return -(-num_characters // self.characters_per_token)


def find_bound(backend: tokenizers.Tokenizer) -> LengthBound | None:
    """The bound for a tokenizer; None when it may make one token, or none, of any number of characters."""
    composed = _most_composed(backend.normalizer)
    if composed is None or not _splits_only(backend.pre_tokenizer) or not _spells_all(backend):
        return None
    added = backend.get_added_tokens_decoder().values()
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    return LengthBound(longest * composed, any(token.lstrip or token.rstrip for token in added))


def _most_composed(normalizer: Any) -> int | None:
    """Characters that become one at most; None when some may be dropped."""
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
    """Whether every character ends up in one of the pieces."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    return all(step["type"] in _PRE_TOKENIZERS and step.get("behavior") != "Removed" for step in steps)


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """What a normalizer or a pre-tokenizer does, one thing after another."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps = state[key] if state["type"] == "Sequence" else [state]
    return [inner for step in steps for inner in (step.get(key) or [step])]


def _spells_all(backend: tokenizers.Tokenizer) -> bool:
    """Whether characters without a token of their own are spelled, or become a token each."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if any(step["type"] == "ByteLevel" for step in _steps(backend.pre_tokenizer, "pretokenizers")):
        return all(backend.token_to_id(symbol) is not None for symbol in tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if model.byte_fallback and all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
        return True
    return model.unk_token is not None and not model.fuse_unk
