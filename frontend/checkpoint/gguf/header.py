"""Reads the header of a GGUF file: metadata, and where the tensors lie.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package has a reader, too; it makes
several numpy arrays for each string, which takes 20 seconds for a vocabulary of 150,000 tokens and as many merges.
"""

import importlib.util
import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4


class TensorInfo(NamedTuple):
    """A tensor in the file: ggml's name of its type, its shape (outermost dimension first), its first byte."""

    type: str
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """What a file says before its tensors' bytes."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """The header of the file `path`.

    Raises:
        ConfigError: it is no GGUF file, is cut short or damaged, or the `gguf` package is not installed.
    """
    check_installed(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (struct.error, IndexError, OverflowError, RecursionError):
        raise ConfigError(f"{path} is cut short: its header does not end. Download it again.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None


def check_installed(path: Path) -> None:
    """Raises ConfigError if the package that knows the tensors' formats and names is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"Reading {path} needs the package gguf: pip install 'quire[gguf]'.")


def _parse(path: Path, data: mmap.mmap) -> Header:
    if data[:4] != _MAGIC:
        raise ConfigError(f"{path} is no GGUF file: it begins with {data[:4]!r}.")
    cursor = _Cursor(data, 4)
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ConfigError(
            f"{path} has version {version} of GGUF; versions {' and '.join(map(str, _VERSIONS))} are read, with the "
            "low byte first. Convert it again with a current llama.cpp."
        )
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_fields):
        name = cursor.string()
        metadata[name] = cursor.value(cursor.number("I"))
    infos = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _located(path, name, info, start, len(data)) for name, info in infos}
    return Header(path, metadata, tensors)


def _tensor(cursor: "_Cursor") -> tuple[str, tuple[int, tuple[int, ...], int]]:
    name, num_dimensions = cursor.string(), cursor.number("I")
    if num_dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
    return name, (cursor.number("I"), shape, cursor.number("Q"))


def _located(path: Path, name: str, info: tuple[int, tuple[int, ...], int], start: int, size: int) -> TensorInfo:
    import gguf  # imported here: 0.2 s, for these files only

    number, shape, offset = info
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise ConfigError(
            f"{path}: tensor {name!r} has a type that gguf does not know ({number}): pip install -U gguf."
        ) from None
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    if (shape or (1,))[-1] % block:
        raise ConfigError(
            f"{path} is damaged: tensor {name!r} of shape {list(shape)} has no whole blocks of {block} numbers "
            f"({kind.name}). Download it again."
        )
    if block == 1 and (start + offset) % num_bytes:
        raise ConfigError(
            f"{path} is damaged: tensor {name!r} of {kind.name} begins at byte {start + offset}, inside of a number. "
            "Download it again."
        )
    end = start + offset + math.prod(shape) // block * num_bytes
    if end > size:
        raise ConfigError(
            f"{path} is cut short: tensor {name!r} ends at byte {end}, the file at byte {size}. Download it again."
        )
    return TensorInfo(kind.name, shape, start + offset)


class _Cursor:
    """Reads one value after another."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self.at = at

    def number(self, code: str) -> Any:
        form = "<" + code
        [value] = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        [length] = struct.unpack_from("<Q", self._data, self.at)
        begin = self.at + 8
        self.at = begin + length
        if self.at > len(self._data):
            raise IndexError
        return self._data[begin : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind not in _SCALARS:
            raise ValueError(f"a metadata value is of the unknown type {kind}")
        return self.number(_SCALARS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if length > len(self._data):
            raise IndexError
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(length)]
        form = f"<{length}{_SCALARS[kind]}"
        values = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return list(values)
