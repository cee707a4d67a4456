"""Reads a checkpoint's tensors, each rank only its shard. Knows files and names, not models."""

import difflib
import hashlib
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.core.config.load import LoadConfig
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError

if TYPE_CHECKING:
    from quire.executor.weights.progress_bar import ProgressBar

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Shard(NamedTuple):
    """The part `start:stop` of dimension `dim`."""

    dim: int
    start: int
    stop: int


class WeightReader(Protocol):
    """Tensors by checkpoint name."""

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The tensor (or its shard) on the CPU, in `dtype` or else the reader's, free to be kept or changed.

        `shape` is the whole tensor's, as the model expects it. A tensor of integers is read only as its own dtype.

        Raises:
            ModelLoadError: no such tensor, another shape, or a file that cannot be read.
        """
        ...

    def close(self) -> None:
        """Unmaps the files and ends the progress bar."""
        ...


def open_weights(
    spec: ModelSpec, load: LoadConfig, dtype: torch.dtype, *, seed: int = 0, show_progress: bool = False
) -> WeightReader:
    """The reader that `load.load_format` asks for. `show_progress` draws a bar when stderr is a terminal."""
    if load.load_format == "dummy":
        return DummyWeights(dtype, seed)
    progress = None
    if show_progress and load.use_tqdm_on_load and sys.stderr.isatty():
        from quire.executor.weights.progress_bar import ProgressBar  # 90 ms, saved without a terminal

        progress = ProgressBar()
    return SafetensorsWeights(Path(spec.path), dtype, progress)


class SafetensorsWeights:
    """A folder's `model.safetensors`, indexed files, or any other `*.safetensors`, memory-mapped."""

    def __init__(self, folder: Path, dtype: torch.dtype, progress: "ProgressBar | None" = None) -> None:
        self._dtype = dtype
        self._progress = progress
        self._num_read = 0
        self._exit = ExitStack()
        if progress is not None:
            self._exit.callback(progress.close)
        self._files: dict[str, tuple[Path, Any]] = {}  # tensor name → its open file
        try:
            for path, names in checkpoint_files(folder).items():
                file = self._exit.enter_context(_open(path))
                present = set(file.keys())
                for name in present if names is None else names:
                    if name not in present:
                        raise ModelLoadError(f"{path} lacks tensor {name!r}, which {INDEX_FILE} says it holds.")
                    self._files[name] = (path, file)
        except BaseException:
            self._exit.close()
            raise

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        dtype = dtype or self._dtype
        if name not in self._files:
            raise ModelLoadError(self._missing(name))
        path, file = self._files[name]
        try:
            view = file.get_slice(name)
            if tuple(view.get_shape()) != tuple(shape):
                raise ModelLoadError(
                    f"Tensor {name!r} in {path} is {list(view.get_shape())}; config.json asks for {list(shape)}."
                )
            tensor = view[:] if shard is None else view[_index(shard)]
        except SafetensorError as error:
            raise ModelLoadError(f"Cannot read tensor {name!r} from {path}: {error}") from None
        if tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
            raise ModelLoadError(
                f"Tensor {name!r} in {path} holds {str(tensor.dtype).removeprefix('torch.')}: quantised weights "
                "are not supported yet. Serve a bfloat16, float16 or float32 checkpoint."
            )
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, len(self._files))
        # A copy: the mapping must not stay alive behind a tensor that is kept.
        return tensor.to(dtype, copy=True) if tensor.dtype == dtype else tensor.to(dtype)

    def close(self) -> None:
        self._files = {}
        self._exit.close()

    def _missing(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._files, n=3, cutoff=0.5)
        hint = f" Nearest names: {', '.join(near)}." if near else ""
        return f"The checkpoint has no tensor {name!r}.{hint} Is config.json the one that belongs to these weights?"


class DummyWeights:
    """Random weights, which depend on the seed and not on the number of ranks.

    Element i of a tensor is element (i + offset) of one block of normal numbers, repeated; the offset comes from the
    tensor's name. The block's length is prime, so that no two rows of a weight are alike.
    """

    _PERIOD = 1_048_573

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._dtype = dtype
        self._block = torch.randn(self._PERIOD, generator=torch.Generator().manual_seed(seed))

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        dtype = dtype or self._dtype
        if len(shape) == 1:
            full = torch.full(shape, 1.0 if name.endswith("norm.weight") else 0.0, dtype=dtype)
            return full if shard is None else full[_index(shard)].clone()
        rows = _range(shard, 0, shape)
        columns = _range(shard, 1, shape)
        size = shape[1]
        offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        scaled = (self._block * size**-0.5).to(dtype)
        first = offset + rows.start * size
        flat = self._repeat(scaled, first % self._PERIOD, len(rows) * size)
        return flat.view(len(rows), size)[:, columns.start : columns.stop].contiguous()

    def close(self) -> None:
        """Nothing to close."""

    def _repeat(self, block: Tensor, start: int, count: int) -> Tensor:
        out = torch.empty(count, dtype=block.dtype)
        done = 0
        while done < count:
            part = block[start : start + count - done]
            out[done : done + len(part)] = part
            done, start = done + len(part), 0
        return out


def shard_shape(shape: tuple[int, ...], shard: Shard | None) -> tuple[int, ...]:
    """The shape of a shard of a tensor."""
    return tuple(len(_range(shard, dim, shape)) for dim in range(len(shape)))


def checkpoint_files(folder: Path) -> dict[Path, list[str] | None]:
    """The safetensors files of a checkpoint, each with its tensor names in the index (None: all in the file).

    Raises:
        ModelLoadError: no safetensors files, or an index that cannot be used.
    """
    if (folder / INDEX_FILE).is_file():
        return _read_index(folder)
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return dict.fromkeys(found)
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    if others:
        raise ModelLoadError(
            f"{folder} has no *.safetensors, only {', '.join(others[:3])}: convert it with "
            "`AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)`."
        )
    raise ModelLoadError(f"{folder} holds no weights (*.safetensors); load_format=dummy runs on random ones.")


def _read_index(folder: Path) -> dict[Path, list[str] | None]:
    path = folder / INDEX_FILE
    try:
        weight_map: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        by_file: dict[Path, list[str] | None] = {}
        for name, file_name in weight_map.items():
            names = by_file.setdefault(folder / file_name, [])
            assert names is not None
            names.append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a safetensors index: {error!r}. Download it again.") from None
    missing = sorted(file.name for file in by_file if not file.is_file())
    if missing:
        raise ModelLoadError(f"{path} names {', '.join(missing[:3])}, which {folder} lacks. Finish the download.")
    return by_file


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is corrupt or cut short ({error}). Download it again.") from None


def _index(shard: Shard) -> Any:
    return (slice(None),) * shard.dim + (slice(shard.start, shard.stop),)


def _range(shard: Shard | None, dim: int, shape: tuple[int, ...]) -> range:
    return range(shard.start, shard.stop) if shard is not None and shard.dim == dim else range(shape[dim])
