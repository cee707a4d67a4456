"""Reads weights saved by rank: each rank's files hold its shards and nothing else.

`quire save-sharded-state` writes them for one number of ranks (`executor/inspection/shard_writer.py`).
"""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from quire.core.config.parallel import ExpertPlacement
from quire.core.config.quantization import Quantization, in_words
from quire.core.errors import ModelLoadError
from quire.executor.weights.freed_memory import FreedMemory
from quire.executor.weights.names import HubNames
from quire.executor.weights.readers import Shard, Stored, StoredRows
from quire.executor.weights.tensor_files import SafetensorsFile

MANIFEST = "sharded_state.json"


class Manifest(Struct, kw_only=True):
    """The options that a folder's files were written for, and the shapes of the original checkpoint."""

    tensor_parallel_size: int
    expert_placement: ExpertPlacement | None = None
    dtype: str
    quantization: Quantization | None
    shapes: dict[str, tuple[int, ...]]


def file_name(rank: int, part: int) -> str:
    """Returns the name of one file of a rank."""
    return f"model-rank-{rank}-part-{part}.safetensors"


def experts_flags(placement: ExpertPlacement | None) -> str:
    """Returns the options that place experts in this way."""
    if placement is None:
        return ""
    flags = f"with --enable-expert-parallel --expert-placement-strategy {placement.strategy}"
    if placement.num_redundant:
        flags += f" --enable-eplb --eplb-config.num_redundant_experts {placement.num_redundant}"
    return flags


def key_of(name: str, shard: Shard | None) -> str:
    """Returns the name of a tensor's shard in its file."""
    return name if shard is None else f"{name}[{shard.dim}, {shard.start}:{shard.stop}]"


class ShardedWeights:
    """Maps the files of one rank only.

    Raises:
        ModelLoadError: the folder is for other options, or lacks this rank's files.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        quantization: Quantization | None,
        rank: int,
        num_ranks: int,
        expert_placement: ExpertPlacement | None = None,
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._freed = FreedMemory()
        manifest = _read_manifest(folder)
        if manifest.tensor_parallel_size != num_ranks:
            raise ModelLoadError(
                f"{folder} holds the shards of {manifest.tensor_parallel_size} ranks: start with "
                f"--tensor-parallel-size {manifest.tensor_parallel_size}, or save it again for {num_ranks}."
            )
        if manifest.quantization != quantization:
            raise ModelLoadError(
                f"{folder} was saved with {in_words(manifest.quantization)}, and this start has "
                f"{in_words(quantization)}: a rank then reads other shards. Start with the same, or save it again."
            )
        if manifest.expert_placement != expert_placement:
            raise ModelLoadError(
                f"{folder} was saved {experts_flags(manifest.expert_placement) or 'without --enable-expert-parallel'}, "
                "and a rank otherwise reads other shards: start so, or save it again."
            )
        self.shapes: Mapping[str, tuple[int, ...]] = manifest.shapes
        paths = sorted(folder.glob(file_name(rank, 0).replace("part-0", "part-*")))
        if not paths:
            raise ModelLoadError(f"{folder} lacks {file_name(rank, 0)}. Copy all of its files.")
        self._exit = ExitStack()
        self._files: dict[str, SafetensorsFile] = {}
        try:
            for path in paths:
                file = self._exit.enter_context(closing(SafetensorsFile(path)))
                self._files |= dict.fromkeys(file.names, file)
        except BaseException:
            self._exit.close()
            raise

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        key = key_of(name, shard)
        if key not in self._files:
            raise ModelLoadError(
                f"{self._folder} has no shard {key!r}: it was saved by another version, or for another model. Save it "
                "again with `quire save-sharded-state`."
            )
        return self._freed.counted(self._files[key].read(key, None).to(dtype or self._dtype, copy=True))

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        stored = HubNames().find(name, self.shapes)
        if stored is None:
            return None
        key = next((key for key in self._files if key.partition("[")[0] == name), None)
        # A tensor that no rank reads has only a shape.
        return Stored(self.shapes[stored], self._dtype if key is None else self._files[key].dtype(key))

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return StoredRows(self, layer, out_features)

    def are_same(self, name: str, other: str) -> bool:
        """Returns True if only one of the two is in the files: of equal tensors, the save read one."""
        stored = [HubNames().find(each, self.shapes) for each in (name, other)]
        return None not in stored and not {name, other} <= {key.partition("[")[0] for key in self._files}

    def close(self) -> None:
        self._files = {}
        self._exit.close()


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise ModelLoadError(
            f"{folder} has no {MANIFEST}: write it with `quire save-sharded-state`; shards that another program wrote "
            "are not read."
        ) from None
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error}. Save it again.") from None
