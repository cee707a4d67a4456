"""Turns text into token ids and back, with the `tokenizers` library or code that does it in Python."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.core.config.model import TokenizerMode
from quire.core.errors import ParameterError
from quire.frontend.checkpoint.model_spec import read_json_if_present
from quire.frontend.text.backend import TokenizerBackend
from quire.frontend.text.pairs import PairCut, PairTokens
from quire.frontend.text.pieces import byte_fallback_piece, byte_level_piece, fallback_byte
from quire.frontend.text.text_length import LengthBound
from quire.frontend.text.tokenizer_files import read_tokenizer_files


class _WholeTexts(dict[int, str | None]):
    """A dictionary that fills itself, so that a hit costs no call."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._piece(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class Tokenizer:
    """One checkpoint's tokenizer. Safe to call from several threads.

    Args:
        backend: the tokenizer itself.
        special_tokens: named tokens such as `eos_token`, by name.
        chat_templates: Jinja texts by name; the usual one is called `default`.
        folder, mode, trust_remote_code: from which, and how, the tokenizer was read, so that other processes can
            read it.
    """

    def __init__(
        self,
        backend: TokenizerBackend,
        *,
        special_tokens: dict[str, str],
        chat_templates: dict[str, str],
        folder: Path,
        mode: TokenizerMode = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        self._backend = backend
        self.special_tokens = special_tokens
        self.chat_templates = chat_templates
        self.folder = folder
        self.mode = mode
        self.trust_remote_code = trust_remote_code
        added = backend.added_tokens()
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.kind, self.stripped_spaces = backend.find_kind()
        self._pieces: dict[int, bytes] = {}  # a cache, bounded by the vocabulary

    @classmethod
    def from_folder(cls, folder: Path, mode: TokenizerMode = "auto", trust_remote_code: bool = False) -> "Tokenizer":
        """The tokenizer of the files in `folder`.

        Args:
            mode: `--tokenizer-mode`.
            trust_remote_code: whether a tokenizer that is code of the checkpoint is imported.

        Raises:
            ConfigError: the folder has no tokenizer, or one that cannot be read.
        """
        files = read_tokenizer_files(folder, mode, trust_remote_code)
        return cls(
            files.backend,
            special_tokens=files.special_tokens,
            chat_templates=files.chat_templates,
            folder=folder,
            mode=mode,
            trust_remote_code=trust_remote_code,
        )

    def read_config(self) -> dict[str, Any]:
        """tokenizer_config.json as it is; empty without one."""
        return read_json_if_present(self.folder / "tokenizer_config.json")

    # --------------------------------------------------------------------------------------------------- text to ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with BOS and the like if the checkpoint adds them.

        Raises:
            ParameterError: the text is not valid Unicode.
            TokenizerError: the tokenizer is code that fails on the text.
        """
        try:
            return self._backend.encode(text, add_special_tokens)
        except TypeError:
            raise _surrogate_error(text) from None

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """The begin and end of each token of `encode` in the text, in characters.

        Raises:
            ParameterError: the text is not valid Unicode, or the tokenizer does not know them.
        """
        try:
            offsets = self._backend.offsets(text, add_special_tokens)
        except TypeError:
            raise _surrogate_error(text) from None
        if offsets is None:
            raise ParameterError(
                "This model's tokenizer is code in Python, without the places of tokens in a text; leave "
                "return_token_offsets out.",
                param="return_token_offsets",
            )
        return offsets

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Like `encode`; the `tokenizers` library takes all cores, and not the interpreter's lock."""
        try:
            return self._backend.encode_batch(texts, add_special_tokens)
        except TypeError:
            raise next(_surrogate_error(text) for text in texts if not _is_unicode(text)) from None

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], cut: PairCut) -> list[PairTokens]:
        """Token ids of each two texts as one input, in the form that the checkpoint has for it.

        Args:
            cut: how many tokens of either text to keep, such as `PairLimits.cut`.

        Raises:
            ParameterError: a text is not valid Unicode.
            TokenizerError: the tokenizer is code that fails on the texts.
        """
        try:
            return self._backend.encode_pairs(pairs, cut)
        except TypeError:
            texts = (text for pair in pairs for text in pair)
            raise next(_surrogate_error(text) for text in texts if not _is_unicode(text)) from None

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of `text`'s tokens, without tokenizing it; 0 if there is no bound."""
        return self._length_bound.least_tokens(text) if self._length_bound is not None else 0

    @functools.cached_property
    def _length_bound(self) -> LengthBound | None:
        return self._backend.find_length_bound()

    # --------------------------------------------------------------------------------------------------- ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary are left out."""
        return self._backend.decode(token_ids, skip_special_tokens)

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Like `decode`; the `tokenizers` library takes all cores, and not the interpreter's lock."""
        return self._backend.decode_batch(rows, skip_special_tokens)

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    @functools.cached_property
    def whole_texts(self) -> Mapping[int, str | None]:
        """The text of each token whose bytes are whole characters, None for the others. Filled on lookup."""
        return _WholeTexts(self.piece)

    def token_text(self, token_id: int) -> str:
        """The text of one token, with parts of characters as U+FFFD."""
        return self.piece(token_id).decode("utf-8", "replace")

    @property
    def spells_bytes(self) -> bool:
        """True if the pieces of tokens, joined, are the bytes of their text."""
        return self.kind in ("byte_level", "byte_fallback")

    def is_byte_token(self, token_id: int) -> bool:
        """True if the token is one of the 256 byte tokens, such as `<0x0A>`."""
        return self.kind == "byte_fallback" and fallback_byte(self.token(token_id) or "") is not None

    def _make_piece(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        if self.kind == "byte_level":
            return byte_level_piece(token)
        if self.kind == "byte_fallback":
            return byte_fallback_piece(token)
        return self._backend.decode([token_id], False).encode()

    # ---------------------------------------------------------------------------------------------------- vocabulary

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None outside the vocabulary."""
        return self._backend.token(token_id)

    def token_id(self, token: str) -> int | None:
        """Id of a token by the vocabulary's own spelling."""
        return self._backend.token_id(token)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.vocab_size()

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)


# ------------------------------------------------------------------------------------------------- without tokenizer


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, for what cannot be done without one.

    Raises:
        ParameterError: the server runs without one.
    """
    if tokenizer is None:
        raise ParameterError(
            "This server runs with --skip-tokenizer-init: send token ids instead of text, with detokenize=False.",
            param="prompt",
        )
    return tokenizer


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _surrogate_error(text: str) -> ParameterError:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ParameterError(
            f"The text is no valid Unicode: character {error.start} is a lone surrogate, "
            f"U+{ord(text[error.start]):04X}.",
            param="prompt",
        )
    return ParameterError(f"The text must be a string, not {type(text).__name__}.", param="prompt")
