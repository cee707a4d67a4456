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

from quire.core.checkpoint_file import kind_of
from quire.core.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_MOST = 1 << 24
"""The longest array or text that a header may have, so that a damaged length does not read the whole file."""


class TensorInfo(NamedTuple):
    """A tensor in the file: ggml's name of its type, its shape (outermost dimension first), its first byte."""

    type: str
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """The content of a file before its tensors' bytes."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """The header of the file `path`.

    Raises:
        ConfigError: it is no GGUF file, is cut short or damaged, or the `gguf` package is not installed.
    """
    check_installed(path)
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is {kind_of(path.stat().st_mode)}, where a file belongs. Remove it.")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (struct.error, IndexError, OverflowError, RecursionError):
        raise ConfigError(f"{path} is cut short: its header does not end. Download it again.") from None
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}. Download it again.") from None


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
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        name = cursor.string()
        if name in metadata:
            raise ValueError(f"its metadata have two values of {name!r}")
        metadata[name] = cursor.value(name, cursor.number("I"))
    infos = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    return Header(path, metadata, _located(path, infos, cursor.at, alignment, len(data)))


class _Info(NamedTuple):
    """A tensor's entry in a header; its offset counts from the first tensor's."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def _tensor(cursor: "_Cursor") -> _Info:
    name, num_dimensions = cursor.string(), cursor.number("I")
    if num_dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
    if 0 in shape:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} has no numbers")
    return _Info(name, shape, cursor.number("I"), cursor.number("Q"))


def _located(path: Path, infos: list[_Info], at: int, alignment: int, size: int) -> dict[str, TensorInfo]:
    """The places of the tensors. Each must begin where the one before it ends, rounded up, as llama.cpp demands, too.
    So a damaged shape, type or offset is noticed even if it fits into the file. Bytes behind the last tensor are
    ignored, as in llama.cpp: they may be padding or a signature."""
    start, end = _rounded(at, alignment), 0
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in tensors:
            raise ValueError(f"it has two tensors {info.name!r}")
        if info.offset != end:
            raise ValueError(
                f"tensor {info.name!r} begins at byte {info.offset} of the tensors, and the one before it ends at {end}"
            )
        kind, num_bytes = _size(path, info, start)
        last = start + end + num_bytes
        if last > size:
            raise ConfigError(
                f"{path} is cut short: tensor {info.name!r} ends at byte {last}, the file at byte {size}. Download it "
                "again."
            )
        tensors[info.name] = TensorInfo(kind, info.shape, start + end)
        end = _rounded(end + num_bytes, alignment)
    return tensors


def _rounded(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _size(path: Path, info: _Info, start: int) -> tuple[str, int]:
    """(ggml's name of the type, bytes of the tensor)."""
    import gguf  # imported here: 0.2 s, for these files only

    try:
        kind = gguf.GGMLQuantizationType(info.type)
    except ValueError:
        raise ConfigError(
            f"{path}: tensor {info.name!r} has a type that gguf does not know ({info.type}): pip install -U gguf."
        ) from None
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    if (info.shape or (1,))[-1] % block:
        raise ValueError(
            f"tensor {info.name!r} of shape {list(info.shape)} has no whole blocks of {block} numbers ({kind.name})"
        )
    if block == 1 and (start + info.offset) % num_bytes:
        raise ValueError(
            f"tensor {info.name!r} of {kind.name} begins at byte {start + info.offset}, inside of a number"
        )
    return kind.name, math.prod(info.shape) // block * num_bytes


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
        length = self._length(self.number("Q"))
        self.at += length
        return self._data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, name: str, kind: int) -> Any:
        """Reads a value of the type `kind`; `name` is for messages."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(name, self.number("I"), self._length(self.number("Q")))
        if kind not in _SCALARS:
            raise ValueError(f"{name!r} in its metadata is of the unknown type {kind}")
        return self.number(_SCALARS[kind])

    def _array(self, name: str, kind: int, length: int) -> list[Any]:
        if kind not in _SCALARS:
            return [self.value(name, kind) for _ in range(length)]
        form = f"<{length}{_SCALARS[kind]}"
        values = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return list(values)

    def _length(self, length: int) -> int:
        """Checks the length of what begins here, which takes at least a byte for each part."""
        if length > len(self._data) - self.at:
            raise IndexError
        if length > _MOST:
            raise ValueError(f"its header has an array or a text of {length} parts at byte {self.at}")
        return length
