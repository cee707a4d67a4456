"""The interface between a `Tokenizer` and the library or code that has the checkpoint's tokens."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import AddedToken

from quire.frontend.text.pairs import PairCut, PairTokens
from quire.frontend.text.pieces import PieceKind
from quire.frontend.text.text_length import LengthBound


class TokenizerBackend(Protocol):
    """Turns text into ids and back. Called from several threads.

    Texts are valid Unicode: those with lone surrogates raise TypeError. On others code of a checkpoint may fail, which
    raises TokenizerError.
    """

    def add_tokens(self, tokens: Sequence[AddedToken]) -> None:
        """Adds tokens in this order, unless the vocabulary has them. Texts are split at all of these."""

    def added_tokens(self) -> Mapping[int, AddedToken]:
        """Tokens, by id, that are found in a text before it is split."""

    def find_kind(self) -> tuple[PieceKind, int]:
        """How tokens become text, and the number of leading spaces that are stripped from a text."""

    def find_length_bound(self) -> LengthBound | None:
        """The greatest length of a token's text, if there is one."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], cut: PairCut) -> list[PairTokens]:
        """Token ids of each two texts as one input, with special tokens; `cut` says how many of either text to keep."""

    def offsets(self, text: str, add_special_tokens: bool) -> list[tuple[int, int]] | None:
        """The begin and end of each token in the text, in characters; None if that is not known."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids; those outside the vocabulary are left out."""

    def decode_batch(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """The text of each list of token ids."""

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None outside the vocabulary."""

    def token_id(self, token: str) -> int | None:
        """Id of a token by the vocabulary's own spelling."""

    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
