"""Reads whole files of a checkpoint, which a stranger may have made: an error names the file and the remedy."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.core.errors import ModelLoadError

T = TypeVar("T")

MOST_BYTES = 256 << 20
"""The largest file of JSON that is read: ten times the tokenizer of a vocabulary of 250,000 tokens."""


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Reads a file. Opening a named pipe or a device does not wait for whoever writes to it.

    Raises:
        FileNotFoundError: there is no such file.
        ModelLoadError: it is no file, cannot be read, or has more than `most` bytes.
    """
    try:
        with _opened(path) as descriptor:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ModelLoadError(f"{path} is {kind_of(found.st_mode)}, where a file belongs. Download it again.")
            if found.st_size > most:
                raise ModelLoadError(
                    f"{path} has {found.st_size} bytes; at most {most} are read of such a file. Download it again."
                )
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(most)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise ModelLoadError(f"Cannot read {path}: {error}. If it was cut short, download it again.") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """Reads a file of JSON.

    Raises:
        FileNotFoundError: there is no such file.
        ModelLoadError: as for `read_bytes`, or it is no JSON.
    """
    try:
        return json.loads(read_bytes(path).decode())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(_unreadable(path, error)) from None


def read_struct(path: Path, kind: type[T]) -> T:
    """Reads a file of JSON as `kind`, and only the fields that `kind` has.

    Raises:
        FileNotFoundError: there is no such file.
        ModelLoadError: as for `read_bytes`, or it is no such JSON.
    """
    try:
        return msgspec.json.decode(read_bytes(path), type=kind)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelLoadError(_unreadable(path, error)) from None


def check_inside(folder: Path, name: object, source: Path) -> Path:
    """The file or folder `name` of a checkpoint in `folder`, as its file `source` calls it.

    Raises:
        ModelLoadError: the name leads out of the folder.
    """
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ModelLoadError(
            f"{source} names {name!r}, which is no file in {folder}. Download it again, from somebody you trust."
        )
    return folder / name


def check_kinds(folder: Path) -> None:
    """Refuses a checkpoint's folder with a pipe, socket or device in it: a reader would wait for it without end.

    Looks at the folder itself and at those in it, as far as a checkpoint has any. Links are followed.

    Raises:
        ModelLoadError: there is one; the message names it.
    """
    for entry in _entries(folder, depth=1):
        try:
            mode = os.stat(entry).st_mode
        except OSError:  # a link without its file: whoever needs the file names it
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ModelLoadError(f"{entry.path} is {kind_of(mode)}, where a file belongs. Remove it.")


def kind_of(mode: int) -> str:
    """A word for what is no regular file."""
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((word for fits, word in kinds if fits(mode)), "no file")


def _entries(folder: Path | str, depth: int) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError:
        return []
    inner = [entry for entry in found if depth and entry.is_dir() and not entry.name.startswith(".")]
    return found + [each for entry in inner for each in _entries(entry.path, depth - 1)]


def _unreadable(path: Path, error: Exception) -> str:
    reason = "its brackets nest too deeply" if isinstance(error, RecursionError) else str(error)
    return f"Cannot read {path}: {reason}. If it was cut short, download it again."
