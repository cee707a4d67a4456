"""Finds a checkpoint: the embedded demo model, a local folder, or a repository on the Hugging Face hub.

This module handles names and folders, and reads no file.
"""

import difflib
import importlib.resources
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_spec import read_model_spec

__all__ = ["DEMO_MODEL_NAME", "find_model", "find_tokenizer", "read_model_spec"]

DEMO_MODEL_NAME = "quire-demo"
"""The name for clients of the embedded model, which is served by default."""


class _Wanted(NamedTuple):
    """Patterns of the files of a repository that are downloaded, and of those that are not."""

    files: list[str]
    without: list[str]


_SKIPPED = ["original/*", "onnx/*"]  # the same weights in other formats
_TOKENIZER = _Wanted(["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"], _SKIPPED)
_WEIGHTS = {
    "safetensors": _Wanted(["*.safetensors"], [*_SKIPPED, "consolidated*"]),
    "pt": _Wanted(["*.bin", "*.pt", "*.pth"], [*_SKIPPED, "consolidated*"]),
    "mistral": _Wanted(["consolidated*.safetensors"], _SKIPPED),
}


def find_model(model: ModelConfig, load: LoadConfig) -> Path:
    """The local folder of the checkpoint that `model` names, downloaded if it is on the hub.

    Raises:
        ConfigError: there is no such checkpoint, or the hub cannot be reached.
    """
    if model.model is None:
        return _demo_folder()
    if load.load_format == "dummy":
        return _find(model.model, "--model", model.revision, _TOKENIZER, model, load)
    asked = "safetensors" if load.load_format == "sharded_state" else load.load_format
    formats = list(_WEIGHTS) if asked == "auto" else [asked]
    for name in formats:  # a repository may have the same weights in several formats: the first is enough
        files, without = _WEIGHTS[name]
        wanted = _Wanted([*files, *_TOKENIZER.files], without)
        folder = _find(model.model, "--model", model.revision, wanted, model, load)
        if any(path for pattern in files for path in folder.glob(pattern)):
            break
    return folder


def find_tokenizer(model: ModelConfig, load: LoadConfig, model_folder: Path) -> Path:
    """The local folder of the tokenizer: the checkpoint's own, unless another, or another revision, is named."""
    revision = model.tokenizer_revision
    name = model.tokenizer or (model.model if revision not in (None, model.revision) else None)
    return model_folder if name is None else _find(name, "--tokenizer", revision, _TOKENIZER, model, load)


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
        raise ConfigError(f"{flag}: {name!r} is a file; name the folder that holds it, with its config.json.")
    if _is_path(name):
        raise ConfigError(f"{flag}: there is no folder {name!r}. {_hint(folder)}")
    return _download(name, flag, revision, wanted, model.hf_token, load.download_dir)


def _is_path(name: str) -> bool:
    """Whether `name` can only be a path: a hub id is `name` or `owner/name`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _hint(folder: Path) -> str:
    """A suggestion instead of a folder that does not exist."""
    parent = folder.parent
    if not parent.is_dir():
        return f"{str(parent)!r} does not exist either. A model on the hub is named owner/name."
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    close = difflib.get_close_matches(folder.name, siblings, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {str(parent / close[0])!r}?"
    return "Did you mean a model on the hub? Those are named owner/name."


def _download(
    repository: str, flag: str, revision: str | None, wanted: _Wanted, token: str | bool | None, cache: str | None
) -> Path:
    # Imported here, because a local model does not need the hub client, whose import takes 0.3 s.
    import huggingface_hub
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
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                token=token,
                cache_dir=cache,
                allow_patterns=wanted.files,
                ignore_patterns=wanted.without,
            )
        )
    except Exception as error:
        for kind, reason in reasons:
            if isinstance(error, kind):
                raise refuse(f"{reason()} ({str(error).strip().splitlines()[0]})") from error
        raise
