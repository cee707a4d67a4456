"""The scheme of a quantized checkpoint, whose layers are read without rounding again."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization import sharding
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.quantization.stored_layer import REMEDY, StoredLayer
from quire.executor.weights.readers import Stored, TensorSource
from quire.ops.linear import LinearWeight
from quire.ops.quantized import QuantizedWeight


class LayerFormat(Protocol):
    """One way to store a quantized linear layer."""

    def is_in(self, layer: StoredLayer) -> bool:
        """Recognizes the layer by its tensors, in a checkpoint whose names are known."""
        ...

    def read(self, layer: StoredLayer) -> LinearWeight:
        """Reads the layer's wanted outputs with all inputs.

        If a `QuantizedWeight` cannot represent the groups, the result is a dequantized tensor in the model's dtype.
        """
        ...


class Exclusions:
    """Layers that a config leaves unquantized, by names, beginnings, parts or patterns (`re:…`, or as a shell's).

    Raises:
        ModelLoadError: the text after `re:` is no regular expression.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._finders = [_finder(name) for name in frozenset(names)]

    def __contains__(self, layer: str) -> bool:
        return any(find(layer) for find in self._finders)


def _finder(name: str) -> Callable[[str], re.Match[str] | None]:
    if not name.startswith("re:"):
        return re.compile(rf"(?:^|\.){fnmatch.translate(name)[:-2]}(?:$|\.)").search  # without its end, `\Z`
    try:
        return re.compile(name.removeprefix("re:")).match
    except re.error as error:
        raise ModelLoadError(
            f"config.json's quantization_config has {name!r} as a layer, which is no regular expression ({error}). "
            f"{REMEDY}"
        ) from None


@dataclass(frozen=True)
class CheckpointFormat:
    """Reads each layer in the layer format that its tensors have, quantized or plain.

    Attributes:
        layer_formats: those that layers may have. The first one is assumed where the tensors' names are not known: for
            random weights, and where a plan is made without the files.
        excluded: the layers that are plain in that case.
    """

    layer_formats: Sequence[LayerFormat]
    excluded: Exclusions = field(default_factory=lambda: Exclusions(()))
    dtype: torch.dtype = torch.float32

    def read_weight(self, source: TensorSource, part: LinearPart, in_features: int) -> LinearWeight:
        name, out_features, shard, _ = part
        stored = source.locate(name, out_features)
        first, last = (shard.start, shard.stop) if shard.dim == 0 else (0, out_features)
        rows, index = range(first, last), None
        if stored.outputs is not None and first < last:
            wanted = stored.outputs[first:last]
            rows = range(int(wanted.min()), int(wanted.max()) + 1)
            index = wanted - rows.start
        layer = StoredLayer(stored.reader, stored.name, stored.out_features, in_features, rows, self.dtype)
        layer_format = self._layer_format(layer)
        if layer_format is None:
            return source.read(f"{name}.weight", (out_features, in_features), shard)
        weight = layer_format.read(layer)
        _check_finite(weight, layer.name)
        if index is not None and not torch.equal(index, torch.arange(len(rows), device=index.device)):
            weight = _take_outputs(weight, index)
        if shard.dim == 0:
            return weight
        if isinstance(weight, QuantizedWeight):
            return sharding.take_inputs(weight, shard.start, shard.stop, self.dtype, name)
        return weight[:, shard.start : shard.stop].contiguous()

    def read_dequantized(self, source: TensorSource, part: LinearPart, in_features: int, dtype: torch.dtype) -> Tensor:
        return sharding.dequantized(self.read_weight(source, part, in_features), dtype)

    def read_rows(self, source: TensorSource, part: LinearPart, in_features: int) -> LinearWeight:
        name = f"{part.name}.weight"
        stored = source.find(name, Stored((), self.dtype))
        if stored is not None and stored.dtype.itemsize > 1:
            return source.read(name, (part.out_features, in_features), part.shard)
        return self.read_weight(source, part, in_features)

    def for_head(self, rows: LinearWeight, part: LinearPart) -> LinearWeight:
        return rows

    def _layer_format(self, layer: StoredLayer) -> LayerFormat | None:
        if not layer.is_known:
            return None if layer.name in self.excluded else self.layer_formats[0]
        found = next((layer_format for layer_format in self.layer_formats if layer_format.is_in(layer)), None)
        plain = layer.find("weight")
        if found is None and plain is not None and plain.dtype.itemsize == 1:
            kind = str(plain.dtype).removeprefix("torch.")
            raise ModelLoadError(
                f"{layer.name}.weight holds {kind}, in none of the ways that are read for this checkpoint's "
                "quantization. Serve the unquantized checkpoint, or one in compressed-tensors, GPTQ, AWQ or FP8."
            )
        return found


def _check_finite(weight: LinearWeight, name: str) -> None:
    """Checks that scales, table and offsets are finite: one NaN spoils all outputs of its group.

    Raises:
        ModelLoadError: one is infinite or NaN.
    """
    numbers = weight[1:4] if isinstance(weight, QuantizedWeight) else (weight,)  # scales, table and offsets
    for each in numbers:
        if each is not None and not each.is_meta and not each.isfinite().all():
            raise ModelLoadError(
                f"{name}: of its scales, zero points or codes' values one is NaN or infinite, so that it has no "
                "numbers. The file is damaged, or was made of a model that was: download it again, or take another one."
            )


def _take_outputs(weight: LinearWeight, index: Tensor) -> LinearWeight:
    if isinstance(weight, QuantizedWeight):
        return weight.rows(index.to(weight.codes.device))
    return weight[index.to(weight.device)]
