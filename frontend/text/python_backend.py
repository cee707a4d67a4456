"""Tokenizers that exist in Python alone: classes of Transformers, and code of a checkpoint."""

import random
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from quire.core.errors import TokenizerError
from quire.frontend.text.pair_merging import quicken
from quire.frontend.text.pairs import PairCut, PairTokens
from quire.frontend.text.pieces import (
    PieceKind,
    byte_fallback_text,
    byte_level_piece,
    byte_level_text,
    fallback_byte,
    symbols_of_bytes,
)

_RUN_TOKENS = 64


class PythonBackend:
    """An object of Transformers' `PreTrainedTokenizer` as a `TokenizerBackend`.

    It holds the interpreter's lock, and takes many times longer than the `tokenizers` library.

    Trials find how its code decodes tokens: it decodes every token of the vocabulary, in random runs, with and
    without special ones. A kind whose formula gives the same texts is the tokenizer's kind.

    Raises:
        Exception: of any kind, if its code does not work with this version of Transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._read_vocabulary()
        self._check = quicken(tokenizer)
        tokenizer.decode(self.encode("a", add_special_tokens=True))

    def _read_vocabulary(self) -> None:
        vocabulary = self._tokenizer.get_vocab()
        ids = {*vocabulary.values(), *self._tokenizer.added_tokens_decoder, *self._tokenizer.all_special_ids}
        num_ids = max(len(self._tokenizer), 1 + max(ids))
        spelled = {token_id: _spell(self._tokenizer, token_id) for token_id in range(num_ids)}
        self._tokens = {token_id: token for token_id, token in spelled.items() if token is not None}
        self._ids = {_as_text(token): token_id for token, token_id in vocabulary.items()}
        self._ids |= {token: token_id for token_id, token in reversed(self._tokens.items())}
        self._runs = self._make_runs()

    def _make_runs(self) -> list[list[int]]:
        """Runs with every token once, with adjacent byte tokens, and with white space at both ends of a text."""
        token_ids = list(self._tokens)
        random.Random(0).shuffle(token_ids)
        byte_ids = [token_id for token_id in token_ids if fallback_byte(self._tokens[token_id]) is not None]
        blank = [token_id for token_id in token_ids if _is_blank(self._tokens[token_id])]
        between = [[each, each, token_ids[0], each, each] for each in blank]
        return [*_cut(token_ids, _RUN_TOKENS), *_cut(byte_ids, 4), *between]

    def add_tokens(self, tokens: Sequence[AddedToken]) -> None:
        for token in tokens:
            self._tokenizer.add_tokens([token], special_tokens=token.special)
        if tokens:
            self._read_vocabulary()

    def added_tokens(self) -> Mapping[int, AddedToken]:
        added = dict(self._tokenizer.added_tokens_decoder)
        for run in self._runs:
            if self.decode(run, True) != self.decode(run, False):
                skipped = [each for each in run if self.decode([each], True) != self.decode([each], False)]
                added |= {each: AddedToken(self._tokens[each], special=True) for each in skipped}
        return added

    def find_kind(self) -> tuple[PieceKind, int]:
        texts = [self.decode(run, False) for run in self._runs]
        runs = [[self._tokens[token_id] for token_id in run] for run in self._runs]
        if list(map(byte_level_text, runs)) == texts:
            return "byte_level", 0
        for stripped_spaces in (0, 1):
            if [byte_fallback_text(run, stripped_spaces) for run in runs] == texts:
                return "byte_fallback", stripped_spaces
        return "rewritten", 0

    def find_length_bound(self) -> None:
        return None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TypeError(str(error)) from None
        self._check(text)
        try:
            # A mask would be padded, and code that is older than Transformers 5 cannot pad as it asks.
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, return_attention_mask=False)
        except Exception as error:  # of any kind: it is the tokenizer's code
            raise _failure(self._tokenizer, text, error) from error

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], cut: PairCut) -> list[PairTokens]:
        return [self._encode_pair(*pair, cut) for pair in pairs]

    def _encode_pair(self, first: str, second: str, cut: PairCut) -> PairTokens:
        texts = [self.encode(text, add_special_tokens=False) for text in (first, second)]
        tokenizer = self._tokenizer
        try:
            kept = cut(len(texts[0]), len(texts[1]), tokenizer.num_special_tokens_to_add(pair=True))
            ids = [text[:num_tokens] for text, num_tokens in zip(texts, kept, strict=True)]
            return PairTokens(
                tokenizer.build_inputs_with_special_tokens(*ids),
                tokenizer.create_token_type_ids_from_sequences(*ids),
            )
        except Exception as error:  # of any kind: it is the tokenizer's code
            raise _failure(tokenizer, first + second, error) from error

    def offsets(self, text: str, add_special_tokens: bool) -> None:
        return None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token_id for token_id in token_ids if token_id in self._tokens]
        try:
            return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        except Exception:  # of any kind: code may decode no tokens but those that a text has, and a model samples all
            if len(known) < 2:
                return ""
            return "".join(self.decode([token_id], skip_special_tokens) for token_id in known)

    def decode_batch(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]

    def token(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def vocab_size(self) -> int:
        return len(self._tokens)


def _spell(tokenizer: Any, token_id: int) -> str | None:
    """The vocabulary's own spelling of a token; bytes in GPT-2's alphabet; None outside the vocabulary."""
    try:
        token = tokenizer.convert_ids_to_tokens(token_id)
    except Exception:  # of any kind: it is the tokenizer's code
        return None
    return None if token is None else _as_text(token)


def _failure(tokenizer: Any, text: str, error: Exception) -> TokenizerError:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return TokenizerError(
        f"The tokenizer {type(tokenizer).__name__}, which is code in Python, failed on a text of {len(text)} "
        f"characters with {type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno}). Mend "
        "that code, or serve with another --tokenizer; token ids can be sent instead of the text."
    )


def _as_text(token: str | bytes) -> str:
    return token if isinstance(token, str) else "".join(symbols_of_bytes()[byte] for byte in token)


def _is_blank(token: str) -> bool:
    return not token.replace("▁", " ").strip() or not byte_level_piece(token).strip()


def _cut(values: list[int], length: int) -> list[list[int]]:
    return [values[first : first + length] for first in range(0, len(values), length)]
