"""Reads a checkpoint under the names of Transformers' modules: renamed, fused and split as the library's loader would.

The rules are Transformers' (`conversion_mapping`). Only the reading is ours, so that a rank reads just its shard.
"""

import copy
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from quire.core.errors import ModelLoadError
from quire.executor.layers.vocabulary import with_remedy
from quire.executor.weights.readers import MissingTensorError, Shard, Stored, StoredRows, WeightReader


class ModuleWeights:
    """A reader by the names of a model's modules. A tied weight that is not stored is read as the other one. Two tied
    weights that are both stored are read separately, as in Transformers.

    Args:
        transposed: names of weights that the model has as [in, out] and its reader as [out, in].
    """

    def __init__(self, weights: WeightReader, model: PreTrainedModel, transposed: Iterable[str]) -> None:
        self._weights = weights
        self._config = model.config
        self._transposed = frozenset(transposed)
        self._tied: Mapping[str, str] = dict(model.all_tied_weights_keys)
        self._untied = {} if self._tied else _both_ways(model._tied_weights_keys)
        self._model = types.SimpleNamespace(
            get_parameter=model.state_dict().__getitem__
        )  # the conversions read its parameters' shapes
        self._sources: dict[str, str] = {}  # stored name, by the module's
        self._conversions: dict[str, tuple[WeightConverter, str, list[tuple[str, str]]]] = {}
        self._converted: dict[str, Tensor] = {}  # results that nothing has read yet
        self._instead: dict[str, str] = {}  # tied weight that is not stored → the stored one
        if weights.shapes is not None:
            self._map_names(model, weights.shapes)
            self._map_tied()

    def has(self, name: str) -> bool:
        """Returns True if `read` finds the tensor."""
        return self._weights.shapes is None or name in self._instead or self._is_stored(name)

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if name in self._transposed:
            flipped = None if shard is None else shard._replace(dim=1 - shard.dim)
            return self._read(name, shape[::-1], flipped, dtype).t().contiguous()
        return self._read(name, shape, shard, dtype)

    @property
    def shapes(self) -> None:
        return None

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        return self._weights.find(self._sources.get(name, name), otherwise)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return StoredRows(self, layer, out_features)

    def are_same(self, name: str, other: str) -> bool:
        """Returns True for equal tensors, and for a tied pair with only one stored. Only tied pairs are compared."""
        if other not in (self._tied.get(name), self._instead.get(name)) and self._tied.get(other) != name:
            return False
        if self._weights.shapes is None or not (self._is_stored(name) and self._is_stored(other)):
            return True
        return self._weights.are_same(self._sources.get(name, name), self._sources.get(other, other))

    def close(self) -> None:
        """Does nothing: the owner of the inner reader closes it."""

    def _read(self, name: str, shape: tuple[int, ...], shard: Shard | None, dtype: torch.dtype | None) -> Tensor:
        if name in self._conversions:
            whole = self._convert(name)
            if tuple(whole.shape) != tuple(shape):
                raise ModelLoadError(
                    f"Tensor {name!r}, made of {self._conversions[name][2][0][1]!r} and others, is "
                    f"{list(whole.shape)}; config.json asks for {list(shape)}."
                )
            whole = whole if dtype is None else whole.to(dtype)
            return whole if shard is None else whole.narrow(shard.dim, shard.start, shard.stop - shard.start).clone()
        if name in self._instead:
            return self._read(self._instead[name], shape, shard, dtype)
        try:
            return self._weights.read(self._sources.get(name, name), shape, shard, dtype)
        except MissingTensorError as error:
            other = self._untied.get(name)
            if other is None or not self._is_stored(other):
                raise
            raise with_remedy(error) from None

    def _map_names(self, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        wanted = model.state_dict()
        parts: dict[str, list[tuple[str, str]]] = {}
        for stored in sorted(shapes, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, wanted)
            if name not in wanted and stored in wanted:
                name, pattern = stored, None
            if pattern is None:
                self._sources[name] = stored
            else:
                parts.setdefault(name, []).append((pattern, stored))
        for name, sources in parts.items():
            converter = by_pattern[sources[0][0]]
            for target in converter.target_patterns:
                self._conversions[name.replace(converter.target_patterns[0], target)] = (converter, name, sources)
        for name in wanted.keys() - self._sources.keys() - self._conversions.keys():
            if self._weights.find(name) is not None:  # in files with other names, such as GGUF
                self._sources[name] = name

    def _map_tied(self) -> None:
        for name, other in self._tied.items():
            if self._is_stored(other) and not self._is_stored(name):
                self._instead[name] = other
            elif self._is_stored(name) and not self._is_stored(other):
                self._instead[other] = name
        for name, other in self._tied.items():  # several weights may be tied to one that is not stored
            if other in self._instead and not self._is_stored(name):
                self._instead[name] = self._instead[other]

    def _is_stored(self, name: str) -> bool:
        return name in self._sources or name in self._conversions

    def _convert(self, name: str) -> Tensor:
        """Builds a tensor from several stored ones. Other results of the same conversion wait until they are read."""
        if name not in self._converted:
            converter, first, sources = self._conversions[name]
            conversion = copy.deepcopy(converter)
            for pattern, stored in sources:
                assert self._weights.shapes is not None
                tensor = self._weights.read(stored, self._weights.shapes[stored])
                conversion.add_tensor(first, stored, pattern, tensor)  # type: ignore[arg-type]
            made: dict[str, Any] = conversion.convert(first, model=self._model, config=self._config)
            self._converted |= {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        return self._converted.pop(name)


def _both_ways(names: object) -> dict[str, str]:
    """Maps each name of a pair that a class could tie to the other. Code from before Transformers 5 has no pairs."""
    if not isinstance(names, Mapping):
        return {}
    return {**names, **{other: name for name, other in names.items()}}


def fill(model: PreTrainedModel, weights: ModuleWeights, device: torch.device) -> None:
    """Reads the parameters and buffers that have not been replaced in `model`.

    Those that a checkpoint may lack, such as tables of sines, are computed as Transformers computes them.
    """
    optional = [*(model._keys_to_ignore_on_load_missing or []), *(model._keys_to_ignore_on_load_unexpected or [])]
    for prefix, module in model.named_modules():
        is_computed = False
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            full = f"{prefix}.{name}" if prefix else name
            if not weights.has(full) and any(re.search(pattern, full) for pattern in optional):
                value, is_computed = torch.zeros(parameter.shape, dtype=parameter.dtype), True
            else:
                value = weights.read(full, tuple(parameter.shape), dtype=parameter.dtype)
            module._parameters[name] = nn.Parameter(value, requires_grad=False)
        if is_computed:
            model._init_weights(module)
        _fill_buffers(module, prefix, weights)
    nn.Module.to(model, device)


def _fill_buffers(module: nn.Module, prefix: str, weights: ModuleWeights) -> None:
    for name, buffer in list(module._buffers.items()):
        full = f"{prefix}.{name}" if prefix else name
        if buffer is not None and name not in module._non_persistent_buffers_set and weights.has(full):
            module._buffers[name] = weights.read(full, tuple(buffer.shape), dtype=buffer.dtype)
