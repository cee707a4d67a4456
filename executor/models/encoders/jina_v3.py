"""Jina's embeddings v3 (arXiv:2409.10173): XLM-RoBERTa with rotary positions, and an adapter for each task."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.config.task_adapters import NO_ADAPTER, TaskAdapters
from quire.core.errors import ModelLoadError
from quire.executor.layers.adapted import base_layers
from quire.executor.layers.adapters import Adapters, AdapterWeight, LayerAdapters
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import whole
from quire.executor.models.encoders.bert import flash_pieces
from quire.executor.models.encoders.heads import WORDS, DenseForm, HeadForms
from quire.executor.models.encoders.rotary import TYPES, RotaryBertModel, RotaryForm
from quire.executor.weights.readers import Shard, Stored, StoredRows, WeightReader
from quire.executor.weights.rearranged import Piece

_TABLES = (WORDS, TYPES)


class JinaV3Model(RotaryBertModel):
    """The weights have the adapter of one task; those of other tasks are changes, which requests ask for.

    Attributes:
        task_adapter: see `HasTaskAdapters`.
    """

    FORM = RotaryForm(
        ("roberta",), "encoder.layers.{}", bias=True, is_gated=False, down_bias=True, eps=1e-5, theta=20_000.0,
        heads=HeadForms(
            DenseForm("classifier.dense", "tanh"), "classifier.out_proj",
            vocabulary_dense=DenseForm("lm_head.dense", "gelu", "lm_head.layer_norm"),
            vocabulary="lm_head.decoder", vocabulary_bias="lm_head.bias",
        ),
    )  # fmt: skip

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        tasks = TaskAdapters.of(spec.hf_config, spec.name)
        adapted = _AdaptedWeights(context.weights, tasks, context.dtype)
        super().__init__(spec, replace(context, weights=adapted))
        # A function keeps the reader, whose tensors are not the model's.
        self.task_adapter = functools.partial(_change_of_task, context.adapters, adapted)

    def pieces(self, spec: ModelSpec, inner: int) -> dict[str, Piece]:
        return flash_pieces(spec.hidden_size)

    def table_adapters(self, context: ModelContext, name: str, num_rows: int, size: int) -> LayerAdapters | None:
        if context.adapters is None:
            return None
        return context.adapters.of_columns(base_layers(context, [whole(name, size)], num_rows, bias=False))


class _LowRank(NamedTuple):
    """One task's change of a stored weight [rows, columns]: the product of `left` [rows, rank] and `right`."""

    left: Tensor
    right: Tensor


class _AdaptedWeights:
    """A reader of weights that are parametrized: `weight` is the original, plus the product of two low-rank tensors.

    These have all tasks' rows: `lora_A` [tasks, rank, in] and `lora_B` [tasks, out, rank]; of an embedding, `lora_A`
    is [tasks, vocab, rank] and `lora_B` [tasks, rank, size].

    Args:
        tasks: None: no weight is parametrized.
    """

    def __init__(self, reader: WeightReader, tasks: TaskAdapters | None, dtype: torch.dtype) -> None:
        self._reader = reader
        self._tasks = tasks
        self._dtype = dtype

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if not self._is_adapted(name):
            return self._reader.read(name, shape, shard, dtype)
        weight = self._reader.read(f"{_parametrized(name)}.original", shape, shard, torch.float32)
        if self._tasks is not None and self._tasks.loaded != NO_ADAPTER:
            left, right = self._factors(name, self._tasks.loaded, shape[0])
            if shard is not None and shard.dim == 0:
                left = left[shard.start : shard.stop]
            elif shard is not None:
                right = right[:, shard.start : shard.stop]
            weight.add_(left @ right)
        return weight.to(dtype or self._dtype)

    def change(self, name: str, task: str, num_rows: int) -> _LowRank | None:
        """Returns the change of a stored weight of `num_rows` from the loaded task to another; None: there is none.

        Raises:
            ModelLoadError: a tensor is missing.
        """
        if self._tasks is None or not self._is_adapted(name):
            return None
        added = [] if task == NO_ADAPTER else [self._factors(name, task, num_rows)]
        loaded = self._tasks.loaded
        if loaded != NO_ADAPTER:
            left, right = self._factors(name, loaded, num_rows)
            added.append(_LowRank(-left, right))
        return _LowRank(torch.cat([each.left for each in added], dim=1), torch.cat([each.right for each in added]))

    def _factors(self, name: str, task: str, num_rows: int) -> _LowRank:
        assert self._tasks is not None, "only tasks have factors"
        number, stored = self._tasks.names.index(task), _parametrized(name)
        found = []
        for factor in ("lora_A", "lora_B"):
            place = self._reader.find(f"{stored}.0.{factor}")
            if place is None:
                raise ModelLoadError(f"The checkpoint has {stored}.original, and no {stored}.0.{factor}.")
            own = Shard(0, number, number + 1)
            found.append(self._reader.read(f"{stored}.0.{factor}", place.shape, own, torch.float32)[0])
        a, b = found
        left, right = (b, a) if len(b) == num_rows else (a, b)
        return _LowRank(left * self._tasks.scale, right)

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        return self._reader.find(f"{_parametrized(name)}.original" if self._is_adapted(name) else name, otherwise)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return self._reader.locate(layer, out_features)._replace(reader=self)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        return self._reader.shapes

    def are_same(self, name: str, other: str) -> bool:
        return not (self._is_adapted(name) or self._is_adapted(other)) and self._reader.are_same(name, other)

    def close(self) -> None:
        self._reader.close()

    def _is_adapted(self, name: str) -> bool:
        shapes = self._reader.shapes
        return shapes is not None and f"{_parametrized(name)}.original" in shapes


def _parametrized(name: str) -> str:
    """Returns the name that torch gives a parametrized tensor."""
    module, _, kind = name.rpartition(".")
    return f"{module}.parametrizations.{kind}"


def _change_of_task(place: Adapters | None, weights: _AdaptedWeights, task: str) -> dict[str, AdapterWeight]:
    """Returns the changes of layers from the loaded task to another, by their names; see `HasTaskAdapters`."""
    changes: dict[str, AdapterWeight] = {}
    layers: Sequence[LayerAdapters] = () if place is None else place.layers
    for base in (base for layer in layers for base in layer.bases):
        stored = base.locate()
        if stored is None:
            continue
        # A table's weight has a row for each input, a linear layer's one for each output.
        is_table = base.part.name in _TABLES
        change = weights.change(f"{stored.name}.weight", task, base.in_features if is_table else stored.out_features)
        if change is None:
            continue
        a, b = (change.left.T, change.right.T) if is_table else (change.right, change.left)
        changes[base.part.name] = AdapterWeight(a, b if stored.outputs is None else b[stored.outputs])
    return changes
