"""Turns text into token ids and back, with the `tokenizers` library.

`transformers.AutoTokenizer` takes seconds and hundreds of megabytes to import. So it is only used to convert the
tokenizer of a checkpoint without a tokenizer.json.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken

from quire.core.errors import ConfigError, ParameterError
from quire.core.logging import get_logger
from quire.frontend.checkpoint.model_spec import read_json, read_json_if_present
from quire.frontend.text.text_length import LengthBound, find_bound
from quire.frontend.text.truncation import Side

logger = get_logger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

PieceKind = Literal["byte_level", "byte_fallback", "other"]
"""How tokens become text: tokens are bytes (GPT-2), or text with byte tokens (Llama 2), or neither."""


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
        backend: the tokenizer itself; its truncation and padding are disabled.
        special_tokens: named tokens such as `eos_token`, by name.
        chat_templates: Jinja texts by name; the usual one is called `default`.
        folder: the tokenizer's folder.
        truncation_side: the end at which a prompt is truncated, if a request does not say.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        chat_templates: dict[str, str],
        folder: Path,
        truncation_side: Side = "right",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens
        self.chat_templates = chat_templates
        self.folder = folder
        self.truncation_side = truncation_side
        added = backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.kind, self.stripped_spaces = _piece_kind(backend)
        self._pieces: dict[int, bytes] = {}  # a cache, bounded by the vocabulary

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json and the files beside it.

        As in Transformers 5, only tokenizer.json decides whether BOS and EOS are added, and `add_bos_token` is ignored.

        Raises:
            ConfigError: the folder has no tokenizer, or a malformed one.
        """
        config = read_json_if_present(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(config, read_json_if_present(folder / "special_tokens_map.json"))
        backend = _load_backend(folder)
        _add_missing_tokens(backend, config, special_tokens)
        return cls(
            backend,
            special_tokens=special_tokens,
            chat_templates=find_chat_templates(folder, config),
            folder=folder,
            truncation_side="left" if config.get("truncation_side") == "left" else "right",
        )

    def read_config(self) -> dict[str, Any]:
        """tokenizer_config.json as it is; empty without one."""
        return read_json_if_present(self.folder / "tokenizer_config.json")

    # --------------------------------------------------------------------------------------------------- text to ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with BOS and the like if the checkpoint adds them.

        Raises:
            ParameterError: the text is not valid Unicode.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise _surrogate_error(text) from None

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """The begin and end of each token of `encode` in the text, in characters. Raises ParameterError."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).offsets
        except TypeError:
            raise _surrogate_error(text) from None

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Like `encode`, on all cores and without the interpreter's lock."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            raise next(_surrogate_error(text) for text in texts if not _is_unicode(text)) from None
        return [encoding.ids for encoding in encodings]

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of `text`'s tokens, without tokenizing it; 0 if there is no bound."""
        return self._length_bound.least_tokens(text) if self._length_bound is not None else 0

    @functools.cached_property
    def _length_bound(self) -> LengthBound | None:
        return find_bound(self._backend)

    # --------------------------------------------------------------------------------------------------- ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary are left out."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Like `decode`, on all cores and without the interpreter's lock."""
        return self._backend.decode_batch([list(row) for row in rows], skip_special_tokens=skip_special_tokens)

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

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is one of the 256 byte tokens, such as `<0x0A>`."""
        return self.kind == "byte_fallback" and _fallback_byte(self.token(token_id) or "") is not None

    def _make_piece(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        if self.kind == "byte_level":
            return _byte_level_piece(token)
        if self.kind == "byte_fallback":
            byte = _fallback_byte(token)
            return token.replace("▁", " ").encode() if byte is None else bytes([byte])
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    # ---------------------------------------------------------------------------------------------------- vocabulary

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None outside the vocabulary."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_id(self, token: str) -> int | None:
        """Id of a token by the vocabulary's own spelling."""
        return self._backend.token_to_id(token)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)


# --------------------------------------------------------------------------------------------------------------- files


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


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert_backend(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for every error in the file
        raise ConfigError(f"Cannot read {path}: {error}.") from None


def _convert_backend(folder: Path) -> tokenizers.Tokenizer:
    """Converts another format (tokenizer.model, or vocab.json and merges.txt) with Transformers."""
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")):
        raise ConfigError(
            f"There is no tokenizer in {folder}: name one with --tokenizer, "
            "or run on token ids alone with --skip-tokenizer-init."
        )
    logger.info("converting the tokenizer in %s; a tokenizer.json there would start faster", folder)
    from transformers import AutoTokenizer  # imported here, because it takes 5 s and 400 MB and is rarely needed

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Transformers may raise anything on a malformed file
        if "auto_map" in read_json_if_present(folder / "tokenizer_config.json"):
            raise ConfigError(
                f"The tokenizer in {folder} is code of the checkpoint, which is not run; "
                "put a tokenizer.json there, name another with --tokenizer, or use --skip-tokenizer-init."
            ) from error
        raise ConfigError(f"Cannot convert the tokenizer in {folder}: {error}.") from error
    if not converted.is_fast:
        raise ConfigError(
            f"The tokenizer in {folder} has no form that the tokenizers library can run; "
            "name another with --tokenizer, or use --skip-tokenizer-init."
        )
    return converted.backend_tokenizer


def _content(token: Any) -> str | None:
    """The text of a token in a config file, which is a string or an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str]:
    named = {name: _content(config.get(name)) or _content(token_map.get(name)) for name in _NAMED_TOKENS}
    return {name: token for name, token in named.items() if token}


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Adds the tokens that only tokenizer_config.json has, in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            flags = {name: entry[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in entry}
            token = AddedToken(entry["content"], special=entry.get("special", False), **flags)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = [_content(token) for token in (more.values() if isinstance(more, dict) else more)]
    missing = [token for token in [*special_tokens.values(), *extra] if token and token not in known]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(missing)])


def find_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name, from chat_template.jinja, tokenizer_config.json or chat_template.json."""
    templates: dict[str, str] = {}
    legacy = folder / "chat_template.json"
    if legacy.is_file():
        templates |= _named_templates(read_json(legacy).get("chat_template"))
    templates |= _named_templates(config.get("chat_template"))
    files = [*sorted((folder / "additional_chat_templates").glob("*.jinja")), folder / "chat_template.jinja"]
    for path in files:
        if path.is_file():
            name = "default" if path.parent == folder else path.stem
            templates[name] = path.read_text(encoding="utf-8")
    return templates


def _named_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return value if isinstance(value, dict) else {}


# -------------------------------------------------------------------------------------------------------------- pieces


def _piece_kind(backend: tokenizers.Tokenizer) -> tuple[PieceKind, int]:
    """How the decoder turns tokens into text, and the number of leading spaces that it strips from a text."""
    if backend.decoder is None:
        return "other", 0
    decoder = json.loads(backend.decoder.__getstate__())
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


@functools.cache
def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_piece(token: str) -> bytes:
    symbols = _byte_of_symbol()
    try:
        return bytes([symbols[character] for character in token])
    except KeyError:  # an added token, whose bytes are its text
        return token.encode()


def _fallback_byte(token: str) -> int | None:
    """The byte of `<0xAB>`; None for every other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


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
