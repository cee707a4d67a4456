"""Reads the files of a tokenizer: the tokenizer itself, its special tokens, its chat templates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from quire.core.checkpoint_file import read_bytes
from quire.core.config.model import TokenizerMode
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_spec import read_json, read_json_if_present
from quire.frontend.text import message_formats
from quire.frontend.text.backend import TokenizerBackend
from quire.frontend.text.conversion import Converted, convert
from quire.frontend.text.fast_backend import FastBackend
from quire.frontend.text.panics import without_panics

MOST_TEMPLATE_BYTES = 16 << 20
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a tokenizer's files.

    Attributes:
        special_tokens: named tokens such as `eos_token`, by name.
        chat_templates: Jinja texts by name; the usual one is called `default`.
        config: tokenizer_config.json.
    """

    backend: TokenizerBackend
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    config: dict[str, Any]


def read_tokenizer_files(folder: Path, mode: TokenizerMode, trust_remote_code: bool) -> TokenizerFiles:
    """Reads tokenizer.json, or makes a tokenizer of what is there instead; `mode` is `--tokenizer-mode`.

    As in Transformers 5, only tokenizer.json decides whether BOS and EOS are added, and `add_bos_token` is ignored.

    Raises:
        ConfigError: the folder has no tokenizer, or one that cannot be read.
    """
    config = read_json_if_present(folder / "tokenizer_config.json")
    made = _load(folder, mode, trust_remote_code)
    special_tokens = made.special_tokens | _special_tokens(
        config, read_json_if_present(folder / "special_tokens_map.json")
    )
    _add_missing_tokens(made.backend, config, special_tokens)
    own = made.chat_templates | find_chat_templates(folder, config)
    return TokenizerFiles(made.backend, special_tokens, _with_message_format(own, made.backend, folder, mode), config)


def _with_message_format(
    own: dict[str, str], backend: TokenizerBackend, folder: Path, mode: TokenizerMode
) -> dict[str, str]:
    """Templates of the format that `mode` names, or else the checkpoint's own, or else those of its model's format."""
    name: str | None = mode if mode in message_formats.NAMES else None
    if mode == "auto" and not own:
        name = message_formats.format_of(read_json_if_present(folder / "config.json").get("architectures") or [])
    if name is None:
        return own
    return {"default": message_formats.template_of(name, lambda token: backend.token_id(token) is not None)}


def _load(folder: Path, mode: TokenizerMode, trust_remote_code: bool) -> Converted:
    path = folder / "tokenizer.json"
    if mode in ("slow", "mistral") or not path.is_file():
        return convert(folder, mode, trust_remote_code)
    try:
        return Converted(_fast_backend(path), {}, {})
    except Exception as error:  # the library raises a bare Exception for every error in the file
        raise ConfigError(f"Cannot read {path}: {error}.") from None


@without_panics
def _fast_backend(path: Path) -> FastBackend:
    return FastBackend(tokenizers.Tokenizer.from_file(str(path)))


def _content(token: Any) -> str | None:
    """The text of a token in a config file, which is a string or an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str]:
    named = {name: _content(config.get(name)) or _content(token_map.get(name)) for name in _NAMED_TOKENS}
    return {name: token for name, token in named.items() if token}


def _add_missing_tokens(backend: TokenizerBackend, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Adds the tokens that only tokenizer_config.json has, in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.token_id(entry["content"]) is None:
            flags = {name: entry[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in entry}
            backend.add_tokens([AddedToken(entry["content"], special=entry.get("special", False), **flags)])
    known = {token.content for token in backend.added_tokens().values()}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = [_content(token) for token in (more.values() if isinstance(more, dict) else more)]
    missing = [token for token in [*special_tokens.values(), *extra] if token and token not in known]
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(missing)])


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
            templates[name] = _read_template(path)
    return templates


def _read_template(path: Path) -> str:
    try:
        return read_bytes(path, MOST_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"Cannot read {path}: {error}. Download it again.") from None


def _named_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return value if isinstance(value, dict) else {}
