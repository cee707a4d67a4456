"""Writes a checkpoint as a backend's packed weights, one file for each rank (`executor/weights/packed_state.py`)."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.inspection import FilesSaved
from quire.executor.backends import bind
from quire.executor.inspection.folders import copy_others, make_empty
from quire.executor.layers.context import ModelContext
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.aligned_file import AlignedWriter, writing
from quire.executor.weights.formats import open_weights
from quire.executor.weights.packed_state import (
    INDEX,
    MANIFEST,
    Index,
    Manifest,
    PackedPart,
    PackedState,
    both_key,
    code_digest,
    file_name,
    is_packed,
    model_digest,
    read_key,
)
from quire.executor.weights.packing import ReadExperts, ReadLinear, ReadProducts
from quire.executor.weights.readers import Shard, Stored, StoredRows, WeightReader
from quire.ops.backend import Backend
from quire.ops.linear import LinearWeight
from quire.ops.stored import StoredWeight, take_apart


def pack_model(config: EngineConfig, folder: Path) -> FilesSaved:
    """Packs the weights of each of `config`'s ranks, and copies the checkpoint's other files.

    The ranks' models are built one after another. Each is then built again from its file, as a check that the file is
    complete.

    Raises:
        ModelLoadError: the checkpoint cannot be read, or `folder` cannot be created or has files already.
    """
    spec, size = config.spec, config.layout.tensor
    if is_packed(Path(spec.path)):
        raise ModelLoadError(f"{spec.path} is packed already; name the checkpoint that it was made of.")
    ops, device, dtype = bind(config.device), torch.device(config.device), getattr(torch, spec.dtype)
    make_empty(folder)
    num_bytes = 0
    places = list(product(range(config.layout.pipeline), range(size)))
    for stage, rank in places:
        path, group, layers = folder / file_name(rank, stage), ParallelGroup(rank, size), config.layers_of(stage)
        with _opened(config, rank) as weights, writing(path) as writer, torch.inference_mode():
            recorder = Recorder(ops, weights, writer)
            build_model(spec, ModelContext.of(config, ops, group, device, recorder, recorder, layers))
            num_bytes += writer.finish({INDEX: recorder.index()})
        with (
            contextlib.closing(PackedState(path, ops, dtype, device, config.quantization)) as packed,
            torch.inference_mode(),
        ):
            build_model(spec, ModelContext.of(config, ops, group, device, packed, packed, layers))
    copy_others(Path(spec.path), folder)
    manifest = Manifest(
        source=spec.name,
        tensor_parallel_size=size,
        layers_by_stage=config.layers_by_stage,
        expert_placement=config.expert_placement,
        dtype=spec.dtype,
        quantization=config.quantization,
        layout=ops.layout,
        model=model_digest(spec),
        code=code_digest(),
    )
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))  # last: a folder without it was not finished
    return FilesSaved(len(places), num_bytes)


@contextlib.contextmanager
def _opened(config: EngineConfig, rank: int) -> Iterator[WeightReader]:
    weights = open_weights(
        config.spec,
        config.load,
        getattr(torch, config.spec.dtype),
        quantization=config.quantization,
        rank=rank,
        num_ranks=config.layout.tensor,
        expert_placement=config.expert_placement,
        seed=config.seed,
    )
    with contextlib.closing(weights):
        yield weights


class Recorder:
    """Reads and packs weights for a model that is being built, and writes the results.

    The model gets no packed weight: it will not run, and would otherwise hold all of them in memory. Tensors that are
    read only to be packed are not written.
    """

    def __init__(self, ops: Backend[Any, Any, Any], weights: WeightReader, writer: AlignedWriter) -> None:
        self._ops = ops
        self._weights = weights
        self._writer = writer
        self._is_packing = False
        self._parts: list[list[PackedPart]] = []
        self._num_written = 0
        self._found: dict[str, tuple[tuple[int, ...], str] | None] = {}
        self._same: dict[str, bool] = {}

    def index(self) -> str:
        """Encodes the index that a start needs besides the tensors."""
        shapes = self._weights.shapes
        shapes = None if shapes is None else dict(shapes)
        index = Index(parts=self._parts, found=self._found, same=self._same, shapes=shapes)
        return msgspec.json.encode(index).decode()

    def linear(self, read: ReadLinear) -> None:
        with self._packing():
            weight, bias = read()
        self._parts.append([self._written(self._ops.pack_linear(weight, bias), weight.shape)])

    def products(self, read: ReadProducts) -> list[Any]:
        with self._packing():
            products = read()
        self._parts.append(
            [self._written(self._ops.pack_linear(weight, bias), weight.shape) for weight, bias in products]
        )
        return []

    def gated(self, read: ReadProducts) -> list[Any]:
        with self._packing():
            products = read()
        if len(products) > 1:
            return self.products(lambda: products)
        [(weight, bias)] = products
        self._parts.append([self._written(self._ops.pack_gated_linear(weight, bias), weight.shape)])
        return []

    def experts(self, read: ReadExperts, num_experts: int) -> None:
        with self._packing():
            self._parts.append([self._written(self._ops.pack_experts(read(), num_experts))])

    def dequantized(self, read: Callable[[], Tensor]) -> Tensor:
        if self._is_packing:
            return read()
        with self._packing():
            numbers = read()
        self._parts.append([self._written(numbers)])
        return numbers

    def rows(self, read: Callable[[], LinearWeight]) -> None:
        with self._packing():
            rows = read()
        packed = rows if isinstance(rows, Tensor) else self._ops.pack_linear(rows)
        self._parts.append([self._written(packed, () if isinstance(rows, Tensor) else rows.shape)])

    def shared(self, read: ReadLinear) -> tuple[None, None]:
        with self._packing():
            weight, bias = read()
        packed = self._ops.pack_linear(weight, bias)
        others = [] if self._ops.has_rows(packed) else [self._written(weight)]
        self._parts.append([self._written(packed, weight.shape), *others])
        return None, None

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        tensor = self._weights.read(name, shape, shard, dtype)
        key = read_key(name, shard, tensor.dtype)
        if not self._is_packing and key not in self._writer:
            self._writer.add(key, tensor)
        return tensor

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        return self._weights.shapes

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        found = self._weights.find(name, otherwise)
        self._found[name] = None if found is None else (found.shape, str(found.dtype).removeprefix("torch."))
        return found

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return self._weights.locate(layer, out_features)

    def are_same(self, name: str, other: str) -> bool:
        same = self._same[both_key(name, other)] = self._weights.are_same(name, other)
        return same

    def close(self) -> None:
        """Does nothing: the owner of the inner reader closes it."""

    def _written(self, packed: object, shape: Sequence[int] = ()) -> PackedPart:
        stored: StoredWeight = take_apart(packed, shape)
        number, self._num_written = self._num_written, self._num_written + 1
        names = [f"part {number}.{index}" for index in range(len(stored.tensors))]
        for name, tensor in zip(names, stored.tensors, strict=True):
            self._writer.add(name, tensor)
        return PackedPart(stored.form, names, stored.shape)

    @contextlib.contextmanager
    def _packing(self) -> Iterator[None]:
        """Marks that a weight is read in order to be packed: a start from the files will not read it."""
        self._is_packing = True
        try:
            yield
        finally:
            self._is_packing = False
