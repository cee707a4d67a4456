"""Tokenizers that the `tokenizers` library runs."""

import copy
import json
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import AddedToken

from quire.frontend.text.pairs import PairCut, PairTokens
from quire.frontend.text.panics import failing_as_tokenizer
from quire.frontend.text.pieces import PieceKind
from quire.frontend.text.text_length import LengthBound, find_bound


class FastBackend:
    """A tokenizer of the library as a `TokenizerBackend`. Batches take all cores, without the interpreter's lock.

    Args:
        library: the tokenizer; its truncation and padding are disabled.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library

    def add_tokens(self, tokens: Sequence[AddedToken]) -> None:
        for token in tokens:
            (self._library.add_special_tokens if token.special else self._library.add_tokens)([token])

    def added_tokens(self) -> Mapping[int, AddedToken]:
        return self._library.get_added_tokens_decoder()

    def find_kind(self) -> tuple[PieceKind, int]:
        if self._library.decoder is None:
            return "other", 0
        decoder = json.loads(self._library.decoder.__getstate__())
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            return "byte_level", 0
        if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
            return "other", 0
        if steps[0]["pattern"] != {"String": "▁"} or steps[0]["content"] != " ":
            return "other", 0
        if kinds[3:] == []:
            return "byte_fallback", 0
        if kinds[3:] == ["Strip"] and steps[3]["content"] == " " and steps[3]["stop"] == 0:
            return "byte_fallback", steps[3]["start"]
        return "other", 0

    def find_length_bound(self) -> LengthBound | None:
        return find_bound(self._library)

    @failing_as_tokenizer
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._library.encode(text, add_special_tokens=add_special_tokens).ids

    @failing_as_tokenizer
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    @failing_as_tokenizer
    def encode_pairs(self, pairs: Sequence[tuple[str, str]], cut: PairCut) -> list[PairTokens]:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        found = dict(zip(texts, self._library.encode_batch_fast(texts, add_special_tokens=False), strict=True))
        num_special = self._library.num_special_tokens_to_add(True)
        joined = []
        for pair in pairs:
            first, second = (found[text] for text in pair)
            kept_first, kept_second = cut(len(first), len(second), num_special)
            whole = self._library.post_process(
                _first_tokens(first, kept_first), _first_tokens(second, kept_second), add_special_tokens=True
            )
            joined.append(PairTokens(whole.ids, whole.type_ids))
        return joined

    @failing_as_tokenizer
    def offsets(self, text: str, add_special_tokens: bool) -> list[tuple[int, int]]:
        return self._library.encode(text, add_special_tokens=add_special_tokens).offsets

    @failing_as_tokenizer
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._library.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @failing_as_tokenizer
    def decode_batch(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return self._library.decode_batch([list(row) for row in rows], skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self._library.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def vocab_size(self) -> int:
        return self._library.get_vocab_size(with_added_tokens=True)


def _first_tokens(encoding: tokenizers.Encoding, num_tokens: int) -> tokenizers.Encoding:
    """The encoding itself, or a copy with its first tokens."""
    if len(encoding) > num_tokens:
        encoding = copy.copy(encoding)
        encoding.truncate(num_tokens)
    return encoding
