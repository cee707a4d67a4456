"""Opens files of tensors without reading them: a tensor's bytes are read when it is asked for."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.core.wire import gguf_table
from quire.executor.weights.gguf_file import GgufFiles
from quire.executor.weights.readers import Shard, shard_index

SAFETENSORS_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64,
}  # fmt: skip


_DAMAGED = (
    *(RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(AssertionError, MemoryError, RecursionError),
)
"""Errors of the unpickler for bytes that no `torch.save` writes."""


class TensorFile(Protocol):
    """Tensors by name in one file."""

    names: frozenset[str]

    def path(self, name: str) -> Path:
        """Returns the file that has the tensor, for messages."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, shard: Shard | None, dtype: torch.dtype) -> Tensor:
        """Reads the tensor or its shard in the file's dtype. The result may be a view into the file.

        `dtype` is the model's: weights that a file stores in blocks are dequantized to it.

        Raises:
            ModelLoadError: the file is damaged.
        """
        ...

    def close(self) -> None:
        """Unmaps the file. Views into it stay valid."""
        ...


def open_file(path: Path) -> TensorFile:
    """Opens the file, by its ending. Raises ModelLoadError if it is damaged, or holds something else."""
    if path.name == gguf_table.FILE_NAME:
        return GgufFiles(path)
    return SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)


class SafetensorsFile:
    """A memory-mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is corrupt or cut short ({error}). Download it again.") from None
        self.names = frozenset(self._file.keys())

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's metadata, texts by name."""
        return self._file.metadata() or {}

    def path(self, name: str) -> Path:
        return self._path

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return SAFETENSORS_DTYPES.get(self._file.get_slice(name).get_dtype(), torch.uint8)

    def read(self, name: str, shard: Shard | None, dtype: torch.dtype | None = None) -> Tensor:
        try:
            return self._file.get_tensor(name) if shard is None else self._file.get_slice(name)[shard_index(shard)]
        except SafetensorError as error:
            raise ModelLoadError(f"Cannot read tensor {name!r} from {self._path}: {error}") from None

    def close(self) -> None:
        self._file = None


class PickledFile:
    """A file of `torch.save`. Only its tensors are unpickled, and its code is never run.

    Memory-mapped, so that ranks on one machine share the pages of a file. Files from before torch 1.6 are read whole.
    """

    def __init__(self, path: Path) -> None:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_stored(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        except pickle.UnpicklingError as error:
            raise ModelLoadError(
                f"{path} holds more than tensors, and loading it could run code ({_first_line(error)}). Ask its author "
                "for safetensors, or convert it where you trust it."
            ) from None
        except _DAMAGED as error:
            raise ModelLoadError(f"{path} is corrupt or cut short ({_first_line(error)}). Download it again.") from None
        self._path = path
        self._tensors = _tensors(content)
        if not self._tensors:
            raise ModelLoadError(f"{path} holds no tensors by name; it is no checkpoint of a model.")
        self.names = frozenset(self._tensors)

    def path(self, name: str) -> Path:
        return self._path

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, shard: Shard | None, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._tensors[name]
        return tensor if shard is None else tensor[shard_index(shard)]

    def close(self) -> None:
        self._tensors = {}


def _check_stored(path: Path) -> None:
    """Refuses an archive whose parts are packed or overlap: a few bytes of it would become gigabytes in memory.

    torch.save packs nothing, so that the tensors can be mapped.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ModelLoadError(f"{path} is corrupt or cut short ({_first_line(error)}). Download it again.") from None
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise ModelLoadError(
            f"{path} is a packed archive, which torch.save does not write: it may take any amount of memory. Ask its "
            "author for safetensors."
        )
    if sum(part.file_size for part in parts) > path.stat().st_size:
        raise ModelLoadError(
            f"{path} has parts that are larger than the file: it may take any amount of memory. Download it again."
        )


def _tensors(content: Any) -> dict[str, Tensor]:
    """Returns the tensors of a state dict, which trainers save by itself or as `state_dict` or `model` in a larger
    dict.
    """
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        return {}
    return {str(name): value.detach() for name, value in content.items() if isinstance(value, Tensor)}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
