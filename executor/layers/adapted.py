"""Describes linear layers for adapters, which are read while the model runs."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.adapters import BaseLayer, LayerAdapters
from quire.executor.layers.context import ModelContext
from quire.executor.weights.quantization.online import Online
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard, StoredRows
from quire.ops.quantized import dequantize


def base_layers(context: ModelContext, parts: Sequence[LinearPart], in_features: int, *, bias: bool) -> list[BaseLayer]:
    """Returns layers that have the same `in_features` inputs, of all ranks together; `bias`: each has one."""
    return [
        BaseLayer(
            part,
            in_features,
            bias,
            functools.partial(_locate, context, part),
            functools.partial(_read_weight, context, part, in_features),
            functools.partial(_read_bias, context, part, bias),
        )
        for part in parts
    ]


def label_head_adapters(
    context: ModelContext, name: str, in_features: int, out_features: int, *, bias: bool
) -> LayerAdapters | None:
    """Returns the place of adapters for a layer of a head, which every rank has whole; None: it takes none."""
    if context.adapters is None:
        return None
    shape = (out_features, in_features)
    [base] = base_layers(context, [LinearPart(name, out_features, Shard(0, 0, out_features))], in_features, bias=bias)
    base = base._replace(
        read_weight=lambda: context.read(f"{name}.weight", shape, dtype=torch.float32),
        read_bias=lambda: context.read(f"{name}.bias", (out_features,), dtype=torch.float32) if bias else None,
        is_label_head=True,
    )
    return context.adapters.of_columns([base])


def _locate(context: ModelContext, part: LinearPart) -> StoredRows | None:
    try:
        return context.weights.locate(part.name, part.out_features)
    except ModelLoadError:
        return None


def _read_weight(context: ModelContext, part: LinearPart, in_features: int) -> Tensor:
    """Reads the numbers that the layer multiplies with, which differ from those of a file that is quantized at load."""
    whole = part._replace(shard=Shard(0, 0, part.out_features))
    if isinstance(context.scheme, Online):
        weight = context.scheme.read_weight(context, whole, in_features)
        return weight if isinstance(weight, Tensor) else dequantize(weight)
    return context.read_dequantized(whole, in_features)


def _read_bias(context: ModelContext, part: LinearPart, bias: bool) -> Tensor | None:
    return context.read(f"{part.name}.bias", (part.out_features,)) if bias else None
