"""The layout of a model's KV cache on one rank: the tensors that contain its groups' pages."""

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.layers.step_context import LayerCache
from quire.executor.memory.kv_groups import form_groups
from quire.ops.backend import Backend

_ALIGNMENT = 64
"""The alignment of a layer's part of a page in bytes, if layers have different dtypes."""


class KVLayout:
    """The pages of the pool. A page is a row of every tensor, and may serve any group.

    There are as many tensors as the largest group has layers: the j-th layer of each group uses the j-th tensor. If the
    layers' keys and values differ in size, there is one tensor, whose rows contain a group's layers one after another.

    Attributes:
        groups: see `form_groups`.
        page_bytes: of one page, in all tensors together.
    """

    def __init__(
        self,
        layers: Sequence[AttentionKV],
        ops: Backend,
        *,
        block_size: int,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        encoder_rows: int | None = None,
    ) -> None:
        """Takes the model's `layers`, in order, and the `dtypes` of their keys and values in the cache.

        `encoder_rows` are the most of an encoder input, for layers that attend to one.
        """
        self._layers = layers
        self._ops = ops
        self._block_size = block_size
        self._dtypes = dtypes
        self._device = device
        self._layer_page_bytes = [self._used_bytes(layer) for layer in range(len(layers))]
        if len(set(dtypes)) > 1:  # a layer with larger elements may follow one with bytes
            self._layer_page_bytes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._layer_page_bytes]
        self.groups = form_groups(layers, self._layer_page_bytes, encoder_rows)
        self.page_bytes = self.groups[0].page_bytes

    @property
    def is_quantized(self) -> bool:
        """True if a layer's keys and values are quantized. They are dequantized where kernels do not read them in
        place.
        """
        return any(dtype.itemsize == 1 for dtype in self._dtypes)

    def allocate(self, num_pages: int) -> tuple[list[Tensor], list[LayerCache]]:
        """Allocates the tensors, each [num_pages, bytes] of uint8 zeros, and returns them with each layer's view of
        one.
        """
        sizes = set(self._layer_page_bytes)
        row_bytes = self.page_bytes if len(sizes) > 1 else sizes.pop()
        tensors = [
            zeros(num_pages * row_bytes, self._device).view(num_pages, -1) for _ in range(self.page_bytes // row_bytes)
        ]
        caches = {}
        for number, group in enumerate(self.groups):
            place = 0  # in a page, in bytes
            for layer in group.layers:
                begin = place % row_bytes
                memory = tensors[place // row_bytes][:, begin : begin + self._used_bytes(layer)]
                caches[layer] = LayerCache(memory.view(self._dtypes[layer]).unflatten(1, self._page(layer)), number)
                place += self._layer_page_bytes[layer]
        return tensors, [caches[layer] for layer in range(len(self._layers))]

    def __str__(self) -> str:
        """Describes each kind of layer, and its number of groups, for the log."""
        kinds: dict[str, list[int]] = {}
        for group in self.groups:
            kinds.setdefault(self._layers[group.layers[0]].kind, []).append(len(group.layers))
        parts = [f"{kind} in layers: {sum(sizes)}, groups: {len(sizes)}" for kind, sizes in kinds.items()]
        num_full = sum(group.kind == "full" for group in self.groups)  # other groups do not grow with a sequence
        token_bytes = num_full * self.page_bytes // self._block_size
        parts.append(f"{self.page_bytes} bytes a page of {self._block_size} tokens")
        return "; ".join([*parts, f"{token_bytes} bytes a token"])

    def _page(self, layer: int) -> tuple[int, ...]:
        """Returns the shape of the layer's part of a page."""
        return self._layers[layer].cache_shape(self._ops, 1, self._block_size, self._dtypes[layer])[1:]

    def _used_bytes(self, layer: int) -> int:
        """Returns the bytes of the layer's part of a page."""
        return math.prod(self._page(layer)) * self._dtypes[layer].itemsize


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Allocates [num_bytes] uint8. On a CPU the system allocates page by page, when a page is first written."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    raw = torch.from_numpy(np.zeros(num_bytes + mmap.PAGESIZE, np.uint8))
    start = -raw.data_ptr() % mmap.PAGESIZE  # heads of 4 KiB that straddle two pages are read 6 % slower
    return raw[start : start + num_bytes]
