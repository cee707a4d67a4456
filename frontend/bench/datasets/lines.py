"""Reads the lines of a dataset's file."""

from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from quire.core.errors import ConfigError

Line = TypeVar("Line", bound=Struct)


def read_lines(path: Path, kind: type[Line], what: str) -> list[Line]:
    """Returns the lines of a JSONL file; empty ones do not count.

    Args:
        what: each line holds.

    Raises:
        ConfigError: the file is not there, a line is none of this kind, or there is none.
    """
    try:
        rows = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}.") from None
    lines = []
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            lines.append(msgspec.json.decode(row, type=kind))
        except msgspec.DecodeError as error:
            raise ConfigError(f"--dataset-path {path}, line {number}: {error}.") from None
    if not lines:
        raise ConfigError(f"--dataset-path {path} holds no {what}.")
    return lines
