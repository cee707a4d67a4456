"""Makes hidden states of images: patches, a linear layer, and learned positions."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.wire.media import Array
from quire.executor.layers import media_arrays
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.models.decoder import size_of
from quire.ops.backend import Backend

_STEM = "vision_model.embeddings"


class Patches(Protocol):
    """Makes hidden states [num_tokens, hidden] of an image's arrays."""

    def __call__(self, arrays: Mapping[str, Array]) -> Tensor: ...


def read_patches(
    side: ModelSpec, context: ModelContext, *, has_bias: bool = True, has_class: bool = False, are_cut: bool = False
) -> Patches:
    """Reads the embedding of images, of which `side` has the facts.

    Args:
        has_class: a learned token is before the patches, and a norm after all.
        are_cut: the processor cuts images into patches, of which each image has its own number.
    """
    channels, patch, size = size_of(side, "num_channels"), size_of(side, "patch_size"), side.hidden_size
    name, width = f"{_STEM}.patch_embedding", channels * patch * patch
    shape = (size, width) if are_cut else (size, channels, patch, patch)
    packed = context.packing.linear(
        lambda: (
            context.read(f"{name}.weight", shape).view(size, width),
            context.read(f"{name}.bias", (size,)) if has_bias else None,
        )
    )
    if are_cut:
        num_rows = side.hf_config.get("num_patches", 256)
        return _CutPatches(context, packed, context.read(f"{_STEM}.position_embedding.weight", (num_rows, size)))
    num_rows = (size_of(side, "image_size") // patch) ** 2 + has_class
    positions = context.read(f"{_STEM}.position_embedding.weight", (num_rows, size))
    if not has_class:
        return _Grid(context, packed, positions, patch)
    eps = side.hf_config.get("layer_norm_eps", 1e-5)
    norm = NormStyle(eps, is_centred=True, has_bias=True).layer(context, "vision_model.pre_layrnorm", size)
    return _Grid(context, packed, positions, patch, context.read(f"{_STEM}.class_embedding", (size,)), norm)


class _Grid:
    """Cuts images of one size into patches of `size` × `size` pixels, from left to right and from top to bottom."""

    def __init__(
        self,
        context: ModelContext,
        packed: Any,
        positions: Tensor,
        size: int,
        first: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Takes the rows of `positions` [num_tokens, hidden], and the learned token that is `first` [hidden]."""
        self._context = context
        self._packed = packed
        self._size = size
        self._positions = positions
        self._first = first
        self._norm = norm

    def __call__(self, arrays: Mapping[str, Array]) -> Tensor:
        pixels, size = tensor_of(arrays["pixel_values"], self._context)[0], self._size
        channels, rows, columns = len(pixels), pixels.shape[1] // size, pixels.shape[2] // size
        whole = pixels[:, : rows * size, : columns * size]
        cut = whole.reshape(channels, rows, size, columns, size).permute(1, 3, 0, 2, 4)
        ops: Backend = self._context.ops
        x = ops.linear(cut.reshape(-1, channels * size * size), self._packed)
        if self._first is not None:
            x = torch.cat((self._first.unsqueeze(0), x))
        x = ops.add(self._positions, x)
        return x if self._norm is None else self._norm(x)


class _CutPatches:
    """Reads patches that the processor has cut, and stretches the square table of positions to the image's shape."""

    def __init__(self, context: ModelContext, packed: Any, positions: Tensor) -> None:
        side = round(len(positions) ** 0.5)
        self._context = context
        self._packed = packed
        self._positions = positions.float().t().view(1, -1, side, side)

    def __call__(self, arrays: Mapping[str, Array]) -> Tensor:
        [[height, width]] = np.frombuffer(arrays["spatial_shapes"].data, arrays["spatial_shapes"].dtype).reshape(1, 2)
        patches = tensor_of(arrays["pixel_values"], self._context)[0, : height * width].contiguous()
        rows = F.interpolate(self._positions, (int(height), int(width)), mode="bilinear", antialias=True)
        rows = rows.flatten(2)[0].t().to(patches.dtype).contiguous()
        return self._context.ops.add(self._context.ops.linear(patches, self._packed), rows)


def tensor_of(array: Array, context: ModelContext) -> Tensor:
    """Returns an array in the model's dtype, on its device."""
    return media_arrays.tensor_of(array).to(context.device, context.dtype)
