"""Prepares folders for a rewritten checkpoint: its weights are written anew, all other files are copied."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from quire.core.errors import ModelLoadError
from quire.core.wire import gguf_table
from quire.executor.weights import packed_state, sharded_state

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_MANIFESTS = (packed_state.MANIFEST, sharded_state.MANIFEST)


def make_empty(folder: Path) -> None:
    """Creates the folder. Raises ModelLoadError if that fails, or if the folder has files already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise ModelLoadError(f"--output: cannot make the folder {folder}: {reason}. Name another one.") from None
    if any(folder.iterdir()):
        raise ModelLoadError(f"{folder} holds files already; name a new folder with --output.")


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Converts errors of writing files to the folder within this context to ModelLoadError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelLoadError(
            f"--output: cannot write to {folder}: {reason}. Free space there, or name a folder on another disk."
        ) from None


def copy_others(source: Path, target: Path) -> None:
    """Copies configuration, tokenizer and templates, which are small. The table of a GGUF model loses its files."""
    for path in source.iterdir():
        if path.name == gguf_table.FILE_NAME:
            table = msgspec.structs.replace(gguf_table.read_gguf_table(path), files=[])
            (target / path.name).write_bytes(msgspec.json.encode(table))
        elif path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in _MANIFESTS:
            shutil.copyfile(path, target / path.name)
    templates = "additional_chat_templates"
    if (source / templates).is_dir():
        shutil.copytree(source / templates, target / templates)
