"""Makes a tokenizer of a checkpoint without a tokenizer.json, with Transformers: a fast one if it has such a form.

Importing Transformers takes seconds and hundreds of megabytes, torch among them, so only this conversion does it.
"""

import contextlib
import importlib
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from quire.core.config.model import TokenizerMode
from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.frontend.checkpoint.model_spec import read_json_if_present
from quire.frontend.text.backend import TokenizerBackend
from quire.frontend.text.fast_backend import FastBackend
from quire.frontend.text.panics import without_panics
from quire.frontend.text.python_backend import PythonBackend
from quire.frontend.text.sentence_pieces import PieceFile, cut_as

logger = get_logger(__name__)

TEKKEN = "tekken.json"
_SENTENCE_PIECE = ("sentencepiece", "google.protobuf")
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")
_TEXT_FILES = {
    "vocab.json": "GPT2Tokenizer",
    "vocab.txt": "BertTokenizer",
    "prophetnet.tokenizer": "ProphetNetTokenizer",
}
_MOVED = [
    ("transformers.convert_slow_tokenizer", "bytes_to_unicode", "transformers.models.gpt2.tokenization_gpt2"),
]
"""Functions that code of checkpoints imports from where Transformers 4 had them."""
_ELSE = "name another with --tokenizer, or use --skip-tokenizer-init."


@dataclass(frozen=True)
class Converted:
    """A converted tokenizer, and the special tokens and chat templates that the conversion knows of, by name."""

    backend: TokenizerBackend
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


@dataclass(frozen=True)
class _Source:
    """The file that a tokenizer is built from.

    Attributes:
        class_name: Transformers' class for such files where no configuration names one; None: there are several.
        packages: what reading it needs beside Transformers.
    """

    path: Path
    class_name: str | None
    packages: tuple[str, ...] = ()


def convert(folder: Path, mode: TokenizerMode, trust_remote_code: bool) -> Converted:
    """The tokenizer in `folder`: of tekken.json, SentencePiece or tiktoken files, text files, or the checkpoint's code.

    Raises:
        ConfigError: no such file, a malformed one, a missing package, or code that may not be imported.
    """
    own_class = _own_class(folder)
    if own_class is not None and mode != "mistral" and not (folder / TEKKEN).is_file():
        if not trust_remote_code:
            raise ConfigError(
                f"The tokenizer in {folder} is code of the checkpoint ({own_class}), which is only imported with "
                "--trust-remote-code; put a tokenizer.json there, name another with --tokenizer, or use "
                "--skip-tokenizer-init."
            )
        return _make(folder, lambda: _import_own(folder, own_class))
    source = _find(folder, mode)
    _check_packages(source)
    logger.info("converting the tokenizer %s; a tokenizer.json there would start faster", source.path)
    if source.path.name == TEKKEN:
        return _make(source.path, lambda: _convert_tekken(source.path))
    recut = (lambda made: _recut(folder, source, made)) if source.packages == _SENTENCE_PIECE else None
    return _make(source.path, lambda: _convert_other(folder, source), recut)


def _make(
    path: Path,
    load: Callable[[], Any],
    recut: Callable[[tokenizers.Tokenizer], tokenizers.Tokenizer] | None = None,
) -> Converted:
    """Converts one of Transformers' tokenizers, after `recut`. Raises ConfigError, which names `path`."""
    try:
        made = without_panics(load)()
        if not made.is_fast:
            backend: TokenizerBackend = PythonBackend(made)
        else:
            backend = FastBackend(recut(made.backend_tokenizer) if recut is not None else made.backend_tokenizer)
    except ConfigError:
        raise
    except Exception as error:  # Transformers may raise anything on a malformed file, and a checkpoint's code, too
        raise ConfigError(f"Cannot make a tokenizer of {path}: {_first_line(error)}; {_ELSE}") from error
    if not made.is_fast:
        logger.info("the tokenizer %s is code in Python, which is slow with long texts", type(made).__name__)
    templates = made.chat_template or {}
    return Converted(
        backend,
        {name: str(token) for name, token in made.special_tokens_map.items() if isinstance(token, str)},
        templates if isinstance(templates, dict) else {"default": templates},
    )


def _own_class(folder: Path) -> str | None:
    """The class, as `module.Class`, that tokenizer_config.json names in auto_map: one, or a slow and a fast one."""
    named = read_json_if_present(folder / "tokenizer_config.json").get("auto_map", {})
    classes = (named.get("AutoTokenizer") if isinstance(named, dict) else named) or []
    return next(filter(None, reversed([classes] if isinstance(classes, str) else classes)), None)


def _import_own(folder: Path, class_name: str) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for new_place, name, old_place in _MOVED:
        setattr(importlib.import_module(old_place), name, getattr(importlib.import_module(new_place), name))
    logger.info("importing %s of %s, as --trust-remote-code allows", class_name, folder)
    own_class: Any = get_class_from_dynamic_module(class_name, str(folder), local_files_only=True)
    with _without_tokenizer_json(folder) as alone:
        return own_class.from_pretrained(str(alone), local_files_only=True, trust_remote_code=True)


def _find(folder: Path, mode: TokenizerMode) -> _Source:
    if (folder / TEKKEN).is_file():
        return _Source(folder / TEKKEN, None)
    if mode == "mistral":
        raise ConfigError(f"--tokenizer-mode mistral reads {TEKKEN}, which {folder} lacks; use --tokenizer-mode auto.")
    models = [*sorted(folder.glob("*.model")), *sorted(folder.glob("*.tiktoken"))]
    if models:
        return _model_file(models[0])
    for name, class_name in _TEXT_FILES.items():
        if (folder / name).is_file():
            return _Source(folder / name, class_name)
    if mode == "slow":
        raise ConfigError(
            f"--tokenizer-mode slow converts SentencePiece, tiktoken, {TEKKEN} or vocabulary files, which {folder} "
            "lacks; use --tokenizer-mode auto."
        )
    raise ConfigError(
        f"There is no tokenizer in {folder}: name one with --tokenizer, "
        "or run on token ids alone with --skip-tokenizer-init."
    )


def _model_file(path: Path) -> _Source:
    """A file of SentencePiece, or of tiktoken: lines of a token in base64 and its rank."""
    with path.open("rb") as file:
        first = file.readline(1024)
    if _TIKTOKEN_LINE.fullmatch(first):
        return _Source(path, "TokenizersBackend", ("tiktoken",))
    return _Source(path, "LlamaTokenizer" if path.name == "tokenizer.model" else None, _SENTENCE_PIECE)


def _check_packages(source: _Source) -> None:
    missing = [name for name in source.packages if not _is_installed(name)]
    if missing:
        names = " and ".join(name.removeprefix("google.") for name in missing)
        raise ConfigError(
            f"Reading {source.path} needs {names}: pip install 'quire[tokenizers]', or put a tokenizer.json beside it."
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is part of
        return False


def _convert_tekken(path: Path) -> Any:
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    return convert_tekken_tokenizer(str(path))


@contextlib.contextmanager
def _without_tokenizer_json(folder: Path) -> Iterator[Path]:
    """`folder`, or links to its files but tokenizer.json, which Transformers would read instead of all others."""
    if not (folder / "tokenizer.json").is_file():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="quire-tokenizer-") as name:
        for path in folder.iterdir():
            if path.name != "tokenizer.json":
                (Path(name) / path.name).symlink_to(path.resolve())
        yield Path(name)


def _convert_other(folder: Path, source: _Source) -> Any:
    import transformers

    config = read_json_if_present(folder / "tokenizer_config.json")
    model = read_json_if_present(folder / "config.json")
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    with _without_tokenizer_json(folder) as alone:
        if named or model.get("model_type"):
            auto = transformers.AutoTokenizer.from_pretrained(
                str(alone), local_files_only=True, trust_remote_code=False, mistral_format=False
            )
            # The general class, which Transformers takes where it knows no better, writes no space before a text.
            if named or source.class_name is None or type(auto).__name__ != "TokenizersBackend":
                return auto
        if source.class_name is None:
            raise ConfigError(
                f"Nothing in {folder} says of which kind the tokenizer {source.path.name} is: put "
                'a tokenizer_config.json there with {"tokenizer_class": "T5Tokenizer"}, or whichever class it is.'
            )
        return getattr(transformers, source.class_name).from_pretrained(str(alone), local_files_only=True)


def _recut(folder: Path, source: _Source, made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer of Transformers with texts cut as SentencePiece cuts them, which its own classes do not."""
    file = PieceFile.read(source.path)
    if file is None:
        return made
    config = read_json_if_present(folder / "tokenizer_config.json")
    added = (config.get("added_tokens_decoder") or {}).values()
    named = {token["content"] for token in added} | read_json_if_present(folder / "added_tokens.json").keys()
    return cut_as(file, made, named=named, adds_prefix=config.get("add_prefix_space") is not False)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
