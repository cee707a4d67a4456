"""Builds a model without memory, to count its bytes before any weight is loaded.

The same code builds the model for the same rank, but on torch's meta device, where a tensor is only a shape and a
dtype. So the count reflects the family, the shard, the scheme of the weights, and the backend's packing.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.core.config.resolved import EngineConfig, ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.wire.rank import Rank
from quire.executor import light_torch
from quire.executor.layers.context import ModelContext
from quire.executor.models.base import Model
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.packed_state import open_packed
from quire.executor.weights.packing import PackAtLoad
from quire.executor.weights.readers import Shard, Stored, StoredRows, WeightReader, shard_shape
from quire.ops.backend import Backend

META = torch.device("meta")


class Read(NamedTuple):
    """A tensor that a model asked for; `shape` is the whole tensor's."""

    name: str
    shape: tuple[int, ...]
    shard: Shard | None
    dtype: torch.dtype


class ShapeReader:
    """Returns any tensor as a shape, and records the reads.

    Args:
        like: reads the checkpoint, for models and formats that look at its tensors before they read; None: all names
            exist.
        checks_shapes: compares the shapes of stored tensors with those that are read. False for packed weights, which
            answer only the questions that were asked when they were packed.
    """

    def __init__(self, dtype: torch.dtype, like: WeightReader | None = None, *, checks_shapes: bool = True) -> None:
        self._dtype = dtype
        self._like = like
        self._checks_shapes = checks_shapes
        self.reads: list[Read] = []

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        return None if self._like is None else self._like.shapes

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        found = self._like.find(name) if self._like is not None and self._checks_shapes else None
        if found is not None and found.shape != tuple(shape):
            raise ModelLoadError(f"Tensor {name!r} is {list(found.shape)}; config.json asks for {list(shape)}.")
        self.reads.append(Read(name, tuple(shape), shard, dtype or self._dtype))
        return torch.empty(shard_shape(shape, shard), dtype=dtype or self._dtype, device=META)

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        return otherwise if self._like is None else self._like.find(name, otherwise)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return StoredRows(self, layer, out_features)

    def are_same(self, name: str, other: str) -> bool:
        return name == other if self._like is None else self._like.are_same(name, other)

    def close(self) -> None:
        """Does nothing."""


def dry_build(spec: ModelSpec, context: ModelContext, reader: ShapeReader | None = None) -> Model:
    """Builds the model of `context` with tensors that have no memory. It cannot run.

    Args:
        reader: records the model's reads; None: they are not needed.

    Raises:
        ModelLoadError: as `build_model`, except for faults that show only when tensors are read.
    """
    with _LightMeta():
        return build_model(
            spec,
            replace(
                context,
                device=META,
                weights=reader or ShapeReader(context.dtype, context.weights),
                experts=context.experts and context.experts.without_layers(),
                adapters=context.adapters and context.adapters.without_memory(),
            ),
        )


def dry_stages(config: EngineConfig, context: ModelContext) -> list[Model]:
    """Builds the models of all pipeline stages for one tensor coordinate, without memory; see `dry_build`.

    Raises:
        ModelLoadError: as `dry_build`.
    """
    stages = range(config.layout.pipeline)
    return [dry_build(config.spec, replace(context, layers=config.layers_of(stage))) for stage in stages]


def packed_stages(config: EngineConfig, rank: Rank, context: ModelContext) -> list[Model]:
    """Builds the stages from packed weights. The model of the stage of `rank` has those of `context`, and can run.

    Raises:
        ModelLoadError: as `build_model`, or another stage's file is missing or damaged.
    """
    models = []
    for stage in range(config.layout.pipeline):
        part = replace(context, layers=config.layers_of(stage))
        if stage == rank.pipeline:
            models.append(build_model(config.spec, part))
            continue
        packed = open_packed(config, rank.tensor, context.ops, stage)
        assert packed is not None, "the own stage's weights are packed"
        with contextlib.closing(packed):
            reader = ShapeReader(context.dtype, packed, checks_shapes=False)
            models.append(dry_build(config.spec, replace(part, packing=PackAtLoad(context.ops)), reader))
    return models


def held_bytes(thing: object) -> int:
    """Counts the bytes of the tensors inside `thing`, at any depth; shared memory counts once.

    Tensors of a backend or a group of ranks do not count: a model uses these, and does not own them.
    """
    sizes = dict(_memory(tensor) for tensor in _tensors(thing, set()))
    return sum(sizes.values())


class _LightMeta(TorchFunctionMode):
    """Runs joins and arithmetic on the meta device by shapes only. torch's own operations there import its compiler,
    which takes seconds and a hundred megabytes.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.cat and args[0][0].is_meta:
            return _join(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if name in _ELEMENTWISE and any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
            return _combine(*args[:2])
        try:
            return func(*args, **(kwargs or {}))
        except NotImplementedError:
            if not light_torch.complete():
                raise
            return func(*args, **(kwargs or {}))


_ELEMENTWISE = frozenset(
    operation
    for name in ("add", "sub", "mul", "div", "truediv", "and", "or", "xor", "lshift", "rshift")
    for operation in (name, f"r{name}")
)
"""Operations whose result has the common shape and dtype of two operands."""


def _combine(one: Any, other: Any) -> Tensor:
    tensors = [each for each in (one, other) if isinstance(each, Tensor)]
    shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))  # torch's needs what `light_torch` leaves out
    return torch.empty(shape, dtype=torch.result_type(one, other), device=META)


def _join(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(shape)


def _tensors(thing: object, seen: set[int]) -> Iterator[Tensor]:
    if id(thing) in seen or isinstance(thing, (Backend, ParallelGroup, ModuleType, type)):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    if isinstance(thing, Mapping):
        parts = list(thing.values())
    elif isinstance(thing, (list, tuple)):
        parts = list(thing)
    else:
        parts = list(getattr(thing, "__dict__", {}).values())
    for part in parts:
        yield from _tensors(part, seen)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Returns (an identifier of a tensor's memory, its bytes)."""
    if tensor.layout == torch.strided:
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()
    return id(tensor), tensor.numel() * tensor.element_size()  # for tensors in oneDNN's layout, nothing else is known
