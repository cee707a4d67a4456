"""Writes safetensors files whose tensors begin at multiples of a cache line, so that kernels may use them in place.

Format: https://huggingface.co/docs/safetensors. The library's own writer aligns only to a tensor's element size.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from quire.executor.weights.tensor_files import SAFETENSORS_DTYPES

ALIGNMENT = 64
_COPIED_AT_ONCE = 16 << 20
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@contextlib.contextmanager
def writing(path: Path) -> Iterator["AlignedWriter"]:
    """Opens a writer of the file `path`. Its tensors are spooled in the same folder.

    Raises:
        OSError: the folder is not writable.
    """
    with tempfile.TemporaryFile(dir=path.parent) as data:
        yield AlignedWriter(path, data)


class AlignedWriter:
    """Writes a file of dense tensors one after another, with padding tensors of zeros between them.

    Tensors are spooled to the disk, not to memory, because the file's header is known last. So the disk holds them
    twice while `finish` runs.
    """

    def __init__(self, path: Path, data: IO[bytes]) -> None:
        """Takes `data`, an empty file that is open for writing and reading."""
        self._path = path
        self._data = data
        self._header: dict[str, object] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes `tensor`, which the caller may change afterwards.

        Raises:
            OSError: the disk is full.
        """
        dense = tensor.detach().cpu().contiguous()
        start = self._data.tell()
        self._data.write(dense.flatten().view(torch.uint8).numpy().data)
        end = self._data.tell()
        self._header[name] = {"dtype": _NAMES[dense.dtype], "shape": list(dense.shape), "data_offsets": [start, end]}
        if padding := -end % ALIGNMENT:  # the format has no gaps
            self._data.write(bytes(padding))
            offsets = [end, end + padding]
            self._header[f"padding {end}"] = {"dtype": "U8", "shape": [padding], "data_offsets": offsets}

    def finish(self, metadata: Mapping[str, str]) -> int:
        """Writes the file from the tensors that were added, and returns its size in bytes.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps({"__metadata__": dict(metadata), **self._header}, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        self._data.seek(0)
        with self._path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(self._data, file, _COPIED_AT_ONCE)
            return file.tell()
