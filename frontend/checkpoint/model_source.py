"""Finds a checkpoint: the embedded demo model, a local folder, a GGUF file, or a repository on the Hugging Face hub.

This module handles names and folders, and reads no file; `gguf/` makes a folder of GGUF files.
"""

import difflib
import importlib.resources
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from quire.core.checkpoint_file import check_kinds
from quire.core.config.load import ADAPTERS, BESIDE_WEIGHTS, LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.core.wire import gguf_table
from quire.frontend.checkpoint import gguf
from quire.frontend.checkpoint.model_spec import read_model_spec

logger = get_logger(__name__)

T = TypeVar("T")

__all__ = ["DEMO_MODEL_NAME", "find_model", "find_tokenizer", "read_model_spec"]

DEMO_MODEL_NAME = "quire-demo"
"""The name for clients of the embedded model, which is served by default."""


class _Wanted(NamedTuple):
    """Patterns of the files of a repository that are downloaded, and of those that are not."""

    files: list[str]
    without: list[str]


_SKIPPED = ["original/*", "onnx/*"]  # the same weights in other formats
_TOKENIZER = _Wanted(["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.tokenizer", "*.spm"], _SKIPPED)
_CODE = "*.py"
_WEIGHTS = {
    "safetensors": _Wanted(["*.safetensors"], [*_SKIPPED, *ADAPTERS, "consolidated*"]),
    "pt": _Wanted(["*.bin", "*.pt", "*.pth"], [*_SKIPPED, *ADAPTERS, "consolidated*"]),
    "mistral": _Wanted(["consolidated*.safetensors"], _SKIPPED),
}
_SAME_FILES = {"sharded_state": "safetensors", "bitsandbytes": "auto", "npcache": "pt"}


def find_model(model: ModelConfig, load: LoadConfig) -> Path:
    """The local folder of the checkpoint that `model` names, downloaded if it is on the hub.

    Raises:
        ConfigError: there is no such checkpoint, or the hub cannot be reached.
    """
    if model.model is None:
        return _demo_folder()
    folder = _find_folder(model, load)
    check_kinds(folder)
    return folder


def _find_folder(model: ModelConfig, load: LoadConfig) -> Path:
    assert model.model is not None
    local = _local_gguf(model.model, load)
    if local is not None:
        return gguf.make_folder(local)
    repository, tag = _split_tag(model.model)
    if tag is not None or load.load_format == "gguf":
        return gguf.make_folder(_download_gguf(repository, tag, model, load))
    if load.load_format == "dummy":
        return _own(_find(model.model, "--model", model.revision, _TOKENIZER, model, load))
    asked = _SAME_FILES.get(load.load_format, load.load_format)
    formats = list(_WEIGHTS) if asked == "auto" else [asked]
    for name in formats:  # a repository may have the same weights in several formats: the first is enough
        files, without = _WEIGHTS[name]
        wanted = _Wanted([*files, *_TOKENIZER.files], without)
        folder = _find(model.model, "--model", model.revision, wanted, model, load)
        if _has_weights(folder, files):
            _warn_of_adapters(folder)
            return _own(folder)
    if asked == "auto" and not Path(model.model).expanduser().is_dir() and _listed_gguf(repository, model, load):
        return gguf.make_folder(_download_gguf(repository, None, model, load))
    return _own(folder)


def _own(folder: Path) -> Path:
    """The folder itself, if it has no table of other files, which `gguf.make_folder` alone writes: one that came with a
    checkpoint could name any file of this machine. A packed model's names none. Raises ConfigError."""
    table = folder / gguf_table.FILE_NAME
    is_own = folder.resolve().is_relative_to(gguf.cache_folder().resolve())
    if os.path.lexists(table) and not is_own and (not table.is_file() or gguf_table.read_gguf_table(table).files):
        raise ConfigError(f"{table} is a table of files elsewhere, which no checkpoint has. Remove it.")
    return folder


def find_tokenizer(model: ModelConfig, load: LoadConfig, model_folder: Path) -> Path:
    """The local folder of the tokenizer: the checkpoint's own, unless another, or another revision, is named."""
    revision = model.tokenizer_revision
    name = model.tokenizer or (model.model if revision not in (None, model.revision) else None)
    if name is None:
        return model_folder
    folder = _find(name, "--tokenizer", revision, _TOKENIZER, model, load)
    check_kinds(folder)
    return folder


def _local_gguf(name: str, load: LoadConfig) -> list[Path] | None:
    """The GGUF files that `name` stands for on this machine: a file, a folder that has no other weights, or a folder
    and the tag of one of its files. None: it stands for something else."""
    path, (base, tag) = Path(name).expanduser(), _split_tag(name)
    is_file_name = path.suffix.lower() == ".gguf" and (_is_path(name) or path.parent.is_dir())
    if is_file_name and not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"--model: there is no file {name!r}. {_hint(path)}")
        if load.load_format not in ("auto", "gguf", "dummy"):
            raise ConfigError(f"--model: {name!r} is a GGUF file: drop --load-format {load.load_format}.")
        return gguf.parts_of(path.absolute())  # the hub's cache has links to files without names
    folder = path if tag is None or path.is_dir() else Path(base).expanduser()
    if not folder.is_dir() or load.load_format not in ("auto", "gguf", "dummy"):
        return None
    names = [each.name for each in folder.iterdir() if each.suffix.lower() == ".gguf"]
    has_others = _has_weights(folder, [pattern for wanted in _WEIGHTS.values() for pattern in wanted.files])
    if folder == path and load.load_format != "gguf" and (has_others or not names):
        return None
    return [folder.absolute() / each for each in gguf.choose(names, tag if folder != path else None, str(folder))]


def _has_weights(folder: Path, patterns: list[str]) -> bool:
    """Whether a file in `folder` may hold a model's weights."""
    paths = (path for pattern in patterns for path in folder.glob(pattern))
    return any(not path.name.startswith(BESIDE_WEIGHTS) for path in paths)


def _warn_of_adapters(folder: Path) -> None:
    for path in (path for pattern in ADAPTERS for path in folder.glob(pattern)):
        logger.warning("%s is not applied: merge the adapter into the model to serve it", path)


def _split_tag(name: str) -> tuple[str, str | None]:
    """(repository or folder, the quantization after its colon): `owner/name:Q4_K_M`."""
    base, colon, tag = name.rpartition(":")
    return (base, tag) if colon and base and tag and "/" not in tag and "\\" not in tag else (name, None)


def _download_gguf(repository: str, tag: str | None, model: ModelConfig, load: LoadConfig) -> list[Path]:
    """The files of one model in a repository, which may have it in many quantizations."""
    names = gguf.choose(_listed_gguf(repository, model, load), tag, repository)
    folder = _find(repository, "--model", model.revision, _Wanted(names, []), model, load)
    return [folder / name for name in names]


def _listed_gguf(repository: str, model: ModelConfig, load: LoadConfig) -> list[str]:
    """The GGUF files that a repository has; without the hub, those that were downloaded before."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        folder = _find(repository, "--model", model.revision, _Wanted(["*.gguf"], []), model, load)
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    hub = huggingface_hub.HfApi(token=model.hf_token)
    listed = _ask_hub(
        repository, "--model", model.revision, lambda: hub.list_repo_files(repository, revision=model.revision)
    )
    return [name for name in listed if name.endswith(".gguf")]


def _demo_folder() -> Path:
    folder = Path(str(importlib.resources.files("quire") / "demo_model"))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"This installation has no embedded demo model in {folder}: name one with --model.")
    return folder


def _find(name: str, flag: str, revision: str | None, wanted: _Wanted, model: ModelConfig, load: LoadConfig) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_file():
        raise ConfigError(
            f"{flag}: {name!r} is a file; name the folder that holds it, with its config.json. (A GGUF file ends in "
            ".gguf.)"
        )
    if _is_path(name):
        raise ConfigError(f"{flag}: there is no folder {name!r}. {_hint(folder)}")
    if model.trust_remote_code:
        wanted = _Wanted([*wanted.files, _CODE], wanted.without)
    return _download(name, flag, revision, wanted, model.hf_token, load.download_dir)


def _is_path(name: str) -> bool:
    """Whether `name` can only be a path: a hub id is `name` or `owner/name`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _hint(folder: Path) -> str:
    """A suggestion instead of a folder, or a GGUF file, that does not exist."""
    parent = folder.parent
    if not parent.is_dir():
        return f"{str(parent)!r} does not exist either. A model on the hub is named owner/name."
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir() or entry.suffix.lower() == ".gguf"]
    close = difflib.get_close_matches(folder.name, siblings, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {str(parent / close[0])!r}?"
    return "Did you mean a model on the hub? Those are named owner/name."


def _download(
    repository: str, flag: str, revision: str | None, wanted: _Wanted, token: str | bool | None, cache: str | None
) -> Path:
    # Imported here, because a local model does not need the hub client, whose import takes 0.3 s.
    import huggingface_hub

    return Path(
        _ask_hub(
            repository, flag, revision,
            lambda: huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                token=token,
                cache_dir=cache,
                allow_patterns=wanted.files,
                ignore_patterns=wanted.without,
            ),
        )
    )  # fmt: skip


def _ask_hub(repository: str, flag: str, revision: str | None, question: Callable[[], T]) -> T:
    """The hub's answer. Raises ConfigError with what to do when there is none."""
    from huggingface_hub import errors

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{flag}: {repository!r} is no local folder, and {reason}")

    at = f" at revision {revision!r}" if revision else ""
    reasons: list[tuple[type[Exception], Callable[[], str]]] = [
        (errors.HFValidationError, lambda: "no hub id either. " + _hint(Path(repository))),
        (
            errors.GatedRepoError,
            lambda: "the hub asks for permission: accept its terms on its page and pass --hf-token.",
        ),
        (errors.RevisionNotFoundError, lambda: f"the hub has no revision {revision!r} of it."),
        (
            errors.RepositoryNotFoundError,
            lambda: "the hub does not know it, or it is private (pass --hf-token). " + _hint(Path(repository)),
        ),
        (
            errors.LocalEntryNotFoundError,
            lambda: (
                f"it is not in the hub's cache{at} while the hub cannot be reached (or HF_HUB_OFFLINE is set). "
                "Download it on a machine with network, and pass its folder or --download-dir."
            ),
        ),
        (
            errors.LocalTokenNotFoundError,
            lambda: "--hf-token asks for the token that `hf auth login` saved, and there is none: log in, or name it.",
        ),
        (errors.HfHubHTTPError, lambda: "the hub answered with an error; try again later."),
        (OSError, lambda: "downloading it failed; check the network and the space on disk."),
    ]
    try:
        return question()
    except Exception as error:
        for kind, reason in reasons:
            if isinstance(error, kind):
                raise refuse(f"{reason()} ({str(error).strip().splitlines()[0]})") from error
        raise
