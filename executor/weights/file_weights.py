"""Reads a model's tensors from the files of its checkpoint."""

import difflib
import functools
import math
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.files import WeightFiles
from quire.executor.weights.freed_memory import FreedMemory
from quire.executor.weights.names import Names
from quire.executor.weights.readers import MissingTensorError, Shard, Stored, StoredRows
from quire.executor.weights.tensor_files import TensorFile, open_file

if TYPE_CHECKING:
    from quire.executor.weights.progress_bar import ProgressBar

_COMPARED_BYTES = 16 * 2**20
"""The most bytes of each of two tensors to compare at once."""


class FileWeights:
    """Reads tensors from a checkpoint's files. All files are open; none is read before a tensor is asked for.

    Raises:
        ModelLoadError: a file is damaged.
    """

    def __init__(
        self, files: WeightFiles, names: Names, dtype: torch.dtype, progress: "ProgressBar | None" = None
    ) -> None:
        self._listing = files
        self._names = names
        self._dtype = dtype
        self._progress = progress
        self._num_read = 0
        self._compared: dict[tuple[str, str], bool] = {}
        self._freed = FreedMemory()
        self._exit = ExitStack()
        if progress is not None:
            self._exit.callback(progress.close)
        self._files: dict[str, TensorFile] = {}  # tensor name → its file
        try:
            for path in files.paths:
                file = self._exit.enter_context(closing(open_file(path)))
                self._files.update(dict.fromkeys(file.names, file))
        except BaseException:
            self._exit.close()
            raise

    @functools.cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: file.shape(name) for name, file in self._files.items()}

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        dtype = dtype or self._dtype
        stored = self._names.find(name, self._files)
        if stored is None:
            raise MissingTensorError(self._missing(name))
        file = self._files[stored]
        if file.shape(stored) != tuple(shape):
            raise ModelLoadError(
                f"Tensor {stored!r} in {file.path(stored)} is {list(file.shape(stored))}; config.json asks "
                f"for {list(shape)}."
            )
        if shard is not None and shard.dim == 0 and self._names.mixes_rows(name):
            tensor = self._names.arrange(name, file.read(stored, None, dtype))[shard.start : shard.stop]
        else:
            tensor = self._names.arrange(name, file.read(stored, shard, dtype))
        if tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
            raise ModelLoadError(
                f"Tensor {stored!r} in {file.path(stored)} holds {str(tensor.dtype).removeprefix('torch.')}, where "
                f"{str(dtype).removeprefix('torch.')} is expected: does config.json lack the checkpoint's "
                "quantization_config?"
            )
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, len(self._files))
        # A copy: a tensor that stays must not keep the mapping alive.
        return self._freed.counted(tensor.to(dtype, copy=True, memory_format=torch.contiguous_format))

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        stored = self._names.find(name, self._files)
        if stored is None:
            return None
        file = self._files[stored]
        return Stored(file.shape(stored), file.dtype(stored))

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return StoredRows(self, layer, out_features)

    def are_same(self, name: str, other: str) -> bool:
        stored, others = (self._names.find(each, self._files) for each in (name, other))
        if stored is None or others is None:
            return False
        if (stored, others) not in self._compared:  # a dry build and the real one ask twice
            self._compared[stored, others] = self._have_same_numbers(stored, others)
        return self._compared[stored, others]

    def close(self) -> None:
        self._files = {}
        self._exit.close()

    def _have_same_numbers(self, name: str, other: str) -> bool:
        file, others = self._files[name], self._files[other]
        shape, dtype = file.shape(name), file.dtype(name)
        if (shape, dtype) != (others.shape(other), others.dtype(other)) or not shape:
            return False
        step = max(1, _COMPARED_BYTES // (dtype.itemsize * math.prod(shape[1:]) or 1))
        parts = (Shard(0, start, min(start + step, shape[0])) for start in range(0, shape[0], step))
        return all(torch.equal(file.read(name, part, dtype), others.read(other, part, dtype)) for part in parts)

    def _missing(self, name: str) -> str:
        listed = self._names.find(name, self._listing.listed)
        if listed is not None:
            assert self._listing.index is not None
            file = self._listing.listed[listed]
            return f"{file} lacks tensor {listed!r}, which {self._listing.index.name} says it holds. Download it again."
        near = difflib.get_close_matches(name, self._files, n=3, cutoff=0.5)
        hint = f" Nearest names: {', '.join(near)}." if near else ""
        paths = {file.path(each) for each, file in self._files.items()} or set(self._listing.paths)
        where = " and ".join(sorted(map(str, paths if len(paths) == 1 else {path.parent for path in paths})))
        return f"The checkpoint has no tensor {name!r}.{hint} Is config.json the one that belongs to {where}?"
