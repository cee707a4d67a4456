"""Finds the ids of single tokens in a tokenizer's files, without the tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from quire.core import checkpoint_file
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_spec import read_json_if_present


class _AddedToken(Struct):
    id: int
    content: str


class _Model(Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = {}  # a list has [token, score] by id


class _TokenizerJson(Struct):
    added_tokens: list[_AddedToken] = []
    model: _Model = _Model()


def find_token_ids(folder: Path, tokens: Sequence[str]) -> list[int]:
    """The id of each of `tokens`, spelled as in the vocabulary.

    Raises:
        ConfigError: the vocabulary lacks a token, or the folder has no file of it.
    """
    vocabulary = _vocabulary(folder)
    missing = [token for token in tokens if token not in vocabulary]
    if missing:
        raise ConfigError(f"The tokenizer in {folder} has no token {missing[0]!r}; spell it as in its vocabulary.")
    return [vocabulary[token] for token in tokens]


def _vocabulary(folder: Path) -> dict[str, int]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {**read_json_if_present(folder / "vocab.json"), **read_json_if_present(folder / "added_tokens.json")}
    read = checkpoint_file.read_struct(path, _TokenizerJson)
    vocab = read.model.vocab
    if isinstance(vocab, list):
        vocab = {entry[0]: index for index, entry in enumerate(vocab)}
    return {**vocab, **{token.content: token.id for token in read.added_tokens}}
