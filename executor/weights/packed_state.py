"""Loads a model's weights as a backend packed them, from files that are mapped: no copy, no computation.

`quire pack` writes them (`executor/inspection/pack_writer.py`), one file a rank. A file holds the results of `Packing`,
in the order of the model's construction, and every other tensor that was read. It does not know a backend's layout: a
packed weight is a form and its tensors' bytes (`quire.ops.stored`). So files serve only the code that wrote them, and
processors with the same instructions.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

import quire.executor
import quire.ops
from quire.core.config.parallel import ExpertPlacement
from quire.core.config.quantization import Quantization, in_words, quantization_flags
from quire.core.config.resolved import EngineConfig, ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.weights.packing import ReadExperts, ReadLinear, ReadProducts
from quire.executor.weights.readers import Shard, Stored, StoredRows
from quire.executor.weights.sharded_state import experts_flags, key_of
from quire.executor.weights.tensor_files import SafetensorsFile
from quire.ops.backend import Backend
from quire.ops.linear import LinearWeight
from quire.ops.stored import StoredWeight

MANIFEST = "packed.json"
INDEX = "index"
"""The name of the file's `Index` among its metadata."""


class Manifest(Struct, kw_only=True):
    """The options that a folder's files were packed for; `layers_by_stage` as in `EngineConfig`."""

    source: str
    tensor_parallel_size: int
    layers_by_stage: list[int]
    expert_placement: ExpertPlacement | None
    dtype: str
    quantization: Quantization | None
    layout: str
    model: str
    code: str


class PackedPart(Struct, array_like=True):
    """A `StoredWeight` whose `tensors` are names in the file."""

    form: Any
    tensors: list[str]
    shape: tuple[int, ...]


class Index(Struct, kw_only=True):
    """The answers that a file holds besides its tensors.

    Attributes:
        parts: the results of `Packing`, in order: one part a call, except for `products`, and for `gated` and `shared`
            where there are two.
        found: the answers of `WeightReader.find`, as shape and dtype.
        same: the answers of `WeightReader.are_same`, by both names.
        shapes: `WeightReader.shapes`.
    """

    parts: list[list[PackedPart]]
    found: dict[str, tuple[tuple[int, ...], str] | None]
    same: dict[str, bool]
    shapes: dict[str, tuple[int, ...]] | None


def file_name(rank: int, stage: int = 0) -> str:
    """Returns the name of the file of a rank of a pipeline stage."""
    return f"packed{f'-stage-{stage}' if stage else ''}-rank-{rank}.safetensors"


def read_key(name: str, shard: Shard | None, dtype: torch.dtype) -> str:
    """Returns the name in the file of a tensor that was read."""
    return f"{key_of(name, shard)} as {str(dtype).removeprefix('torch.')}"


def both_key(name: str, other: str) -> str:
    """Returns the key of an answer about two tensors."""
    return f"{name} and {other}"


def model_digest(spec: ModelSpec) -> str:
    """Hashes the settings that a model is built from, except its dtype."""
    text = msgspec.json.encode(
        (spec.architecture, spec.implementation, spec.model_class, spec.config_json), order="deterministic"
    )
    return hashlib.sha256(text).hexdigest()[:20]


@functools.cache
def code_digest() -> str:
    """Hashes the code that reads and packs weights: a change may alter the order in which layers ask for them."""
    digest = hashlib.sha256()
    for package in (quire.ops, quire.executor):
        [root] = package.__path__
        for path in sorted(Path(root).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def is_packed(folder: Path) -> bool:
    """Returns True if `quire pack` wrote the folder."""
    return (folder / MANIFEST).is_file()


def open_packed(config: EngineConfig, rank: int, ops: Backend[Any, Any, Any], stage: int = 0) -> "PackedState | None":
    """Opens the packed weights of a stage's rank; None if the folder has other files, or weights are not read from it.

    Raises:
        ModelLoadError: they were packed for other options, other code or another processor, or a file is damaged.
    """
    folder = Path(config.spec.path)
    if config.load.load_format != "auto" or not is_packed(folder):
        return None
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelLoadError(
            f"Cannot read {folder / MANIFEST}: {error}. Pack the model again with `quire pack`."
        ) from None
    for is_other, reason in _reasons(manifest, config, ops.layout):
        if is_other:
            raise ModelLoadError(f"{folder} {reason} {_remedy(manifest)}")
    path = folder / file_name(rank, stage)
    if not path.is_file():
        raise ModelLoadError(f"{folder} lacks {path.name}. Copy all of its files. {_remedy(manifest)}")
    dtype, device = getattr(torch, config.spec.dtype), torch.device(config.device)
    return PackedState(path, ops, dtype, device, manifest.quantization)


def _reasons(manifest: Manifest, config: EngineConfig, layout: str) -> Sequence[tuple[bool, str]]:
    size, dtype, quantization = manifest.tensor_parallel_size, manifest.dtype, manifest.quantization
    return (
        (manifest.code != code_digest(), "was packed by another version of Quire."),
        (manifest.layout != layout, f"was packed for a processor with {manifest.layout}; this one has {layout}."),
        (
            size != config.layout.tensor,
            f"was packed for {size} ranks: start with --tensor-parallel-size {size}.",
        ),
        (
            manifest.expert_placement != config.expert_placement,
            f"was packed {experts_flags(manifest.expert_placement) or 'without --enable-expert-parallel'}: start so.",
        ),
        (
            config.layout.shares_experts,
            "was packed for one engine: start without --data-parallel-size, or without --enable-expert-parallel.",
        ),
        (
            manifest.layers_by_stage != config.layers_by_stage,
            f"was packed for {_stages_of(manifest.layers_by_stage)}",
        ),
        (dtype != config.spec.dtype, f"was packed with --dtype {dtype}: start with the same."),
        (
            config.quantization not in (None, quantization),
            f"was packed with {in_words(quantization)}: start without the option.",
        ),
        (
            manifest.model != model_digest(config.spec),
            "was packed with another config.json, or with other --hf-overrides or --model-impl.",
        ),
    )


def _stages_of(layers_by_stage: list[int]) -> str:
    if not layers_by_stage:
        return "one pipeline stage: start without --pipeline-parallel-size."
    layers = _joined(layers_by_stage)
    return (
        f"pipeline stages of {layers} layers: start with --pipeline-parallel-size {len(layers_by_stage)} and "
        f"QUIRE_PP_LAYER_PARTITION={layers}."
    )


def _joined(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _remedy(manifest: Manifest) -> str:
    flags = f" --tensor-parallel-size {manifest.tensor_parallel_size}" if manifest.tensor_parallel_size > 1 else ""
    partition = ""
    if manifest.layers_by_stage:
        flags += f" --pipeline-parallel-size {len(manifest.layers_by_stage)}"
        partition = f"QUIRE_PP_LAYER_PARTITION={_joined(manifest.layers_by_stage)} "
    flags += experts_flags(manifest.expert_placement).removeprefix("with")
    flags += quantization_flags(manifest.quantization)
    return f"To pack it again: {partition}quire pack {manifest.source} --output FOLDER{flags}"


class PackedState:
    """Hands out packed weights and tensors as views into the mapped file, which changes do not reach.

    Attributes:
        num_bytes: of the file.
        quantization: the option that the file was packed with.

    Raises:
        ModelLoadError: the file is damaged.
    """

    def __init__(
        self,
        path: Path,
        ops: Backend[Any, Any, Any],
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None,
    ) -> None:
        self.quantization = quantization
        self._path = path
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._file = SafetensorsFile(path)
        try:
            index = msgspec.json.decode(self._file.metadata[INDEX], type=Index)
        except (KeyError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise ModelLoadError(f"{path} is no file of `quire pack`: {error!r}. Pack the model again.") from None
        self.num_bytes = path.stat().st_size
        self.shapes: Mapping[str, tuple[int, ...]] | None = index.shapes
        self._found = index.found
        self._same = index.same
        self._parts = iter(index.parts)

    def linear(self, read: ReadLinear) -> Any:
        return self._next_one()

    def products(self, read: ReadProducts) -> list[Any]:
        return self._next()

    def gated(self, read: ReadProducts) -> list[Any]:
        return self._next()

    def experts(self, read: ReadExperts, num_experts: int) -> Any:
        return self._next_one()

    def dequantized(self, read: Callable[[], Tensor]) -> Tensor:
        return self._next_one()

    def rows(self, read: Callable[[], LinearWeight]) -> Any:
        return self._next_one()

    def shared(self, read: ReadLinear) -> tuple[Any, Any]:
        parts = self._next()
        return parts[0], parts[-1]

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        key = read_key(name, shard, dtype or self._dtype)
        if key not in self._file.names:
            raise self._lacks(f"tensor {key!r}")
        return self._file.read(key, None)

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        if name not in self._found:
            raise self._lacks(f"answer about tensor {name!r}")
        found = self._found[name]
        return None if found is None else Stored(found[0], getattr(torch, found[1]))

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return StoredRows(self, layer, out_features)

    def are_same(self, name: str, other: str) -> bool:
        key = both_key(name, other)
        if key not in self._same:
            raise self._lacks(f"answer about tensors {name!r} and {other!r}")
        return self._same[key]

    def close(self) -> None:
        """Drops the file; views into it stay valid."""
        self._file.close()

    def _next_one(self) -> Any:
        [restored] = self._next()
        return restored

    def _next(self) -> list[Any]:
        parts = next(self._parts, None)
        if parts is None:
            raise self._lacks("further weight")
        return [self._restored(part) for part in parts]

    def _restored(self, part: PackedPart) -> Any:
        tensors = [self._file.read(name, None).to(self._device) for name in part.tensors]
        try:
            return self._ops.restore(StoredWeight(part.form, tensors, part.shape))
        except ValueError as error:
            raise ModelLoadError(f"{self._path}: {error}. Pack the model again.") from None

    def _lacks(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} has no {what}: pack the model again with `quire pack`.")
