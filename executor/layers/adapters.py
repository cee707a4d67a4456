"""The place where linear layers meet adapters: low-rank weights of each, and the adapter of each token of a step.

`ModelContext.adapters` is this place, or None on a worker without adapters. A layer takes its part of it when it is
built. A step fills in the adapters of its tokens before each forward pass, and no layer passes them on. See LoRA,
arXiv:2106.09685.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.ops.backend import Backend
from quire.ops.linear import LowRankWeights


class AdapterLimits(NamedTuple):
    """The adapters that a worker has memory for.

    Attributes:
        max_rank: of each adapter.
    """

    num_adapters: int
    max_rank: int


class AdapterWeight(NamedTuple):
    """One adapter's weights for one layer, of all ranks together.

    Attributes:
        a: [rank, in].
        b: [out, rank], multiplied by the adapter's scale.
    """

    a: Tensor
    b: Tensor


class LayerAdapters:
    """The low-rank weights that all adapters add to one product, which may be of several layers with the same input.

    They stay in place, so a recorded step reads those that were loaded last. A layer without weights for an adapter has
    zeros.

    Attributes:
        is_used: an adapter has weights for the product.
    """

    def __init__(
        self, place: "Adapters", parts: Sequence[LinearPart], in_shards: Sequence[Shard], sizes: Sequence[int]
    ) -> None:
        """Takes as `sizes` the number of each part's outputs on this rank, which may be more than its shard has."""
        self._place = place
        self._parts = parts
        self._in_shards = in_shards
        num_adapters, rank = place.limits
        in_features = sum(shard.stop - shard.start for shard in in_shards)
        a, b = (num_adapters, len(parts) * rank, in_features), (num_adapters, rank, sum(sizes))
        self._weights = LowRankWeights(place.zeros(*a), place.zeros(*b), tuple(sizes))
        self.is_used = False

    @property
    def names(self) -> list[str]:
        """The names of the layers, in order."""
        return [part.name for part in self._parts]

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Adds the products of `x` with each token's adapter to `out`, perhaps in place."""
        if not self.is_used or not self._place.is_active:
            return out
        return self._place.ops.add_low_rank(x, out, self._weights, self._place.tokens(len(x)))

    def load(self, adapter: int, name: str, weight: AdapterWeight) -> None:
        """Copies this rank's part of an adapter's weight for the layer `name`.

        Raises:
            ModelLoadError: it has another shape than the layer.
        """
        self.is_used = True
        max_rank, start = self._place.limits.max_rank, 0
        for number, (part, size) in enumerate(zip(self._parts, self._weights.sizes, strict=True)):
            if part.name == name:
                device, dtype = self._weights.a.device, self._weights.a.dtype
                a, b = (each.to(device, dtype) for each in self._checked(part, weight))
                rank, first = len(a), number * max_rank
                self._weights.a[adapter, first : first + rank] = a
                self._weights.b[adapter, :rank, start : start + len(b)] = b.T
            start += size

    def clear(self, adapter: int) -> None:
        """Removes the weights of an adapter."""
        self._weights.a[adapter] = 0
        self._weights.b[adapter] = 0

    def _checked(self, part: LinearPart, weight: AdapterWeight) -> AdapterWeight:
        a, b = weight
        whole = a.shape[1] if part.shard.dim == 0 else None
        needed = max(shard.stop for shard in self._in_shards)
        fits = len(b) == part.out_features and a.shape[1] >= needed and (whole is None or whole == needed)
        if a.shape[0] != b.shape[1] or not fits or len(a) > self._place.limits.max_rank:
            raise ModelLoadError(
                f"The adapter's weights for {part.name} are {list(a.shape)} and {list(b.shape)}; the layer maps "
                f"{needed} inputs to {part.out_features} outputs, and ranks are at most {self._place.limits.max_rank}."
            )
        inputs = torch.cat([a[:, shard.start : shard.stop] for shard in self._in_shards], dim=1)
        return AdapterWeight(inputs, b[part.shard.start : part.shard.stop] if part.shard.dim == 0 else b)


class Adapters:
    """The adapters of a rank's linear layers, numbered from 0, and those of the tokens of the current step.

    Attributes:
        version: changes when a step with adapters runs other operations than before.
        is_active: some token of the current step has an adapter.
    """

    def __init__(self, limits: AdapterLimits, ops: Backend, dtype: torch.dtype, device: torch.device) -> None:
        self.limits = limits
        self.ops = ops
        self.version = 1
        self.is_active = False
        self._dtype = dtype
        self._device = device
        self._layers: list[LayerAdapters] = []
        self._step: Tensor | None = None
        self._tokens: Tensor | None = None
        self._wanted: Tensor | None = None

    def without_memory(self) -> "Adapters":
        """Returns another place for the same adapters, whose weights are on torch's meta device."""
        return Adapters(self.limits, self.ops, self._dtype, torch.device("meta"))

    def zeros(self, *shape: int) -> Tensor:
        if self._device.type == "meta":
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    # ------------------------------------------------------------------------------------------------------- layers

    def of_columns(
        self, parts: Sequence[LinearPart], in_features: int, sizes: Sequence[int] | None = None
    ) -> LayerAdapters:
        """Returns the weights for layers that have all inputs, and a shard of the outputs.

        `sizes` are the numbers of the layers' outputs on this rank; None: those of the shards.
        """
        sizes = sizes or [part.shard.stop - part.shard.start for part in parts]
        return self._added(LayerAdapters(self, parts, [Shard(1, 0, in_features)], sizes))

    def of_rows(self, name: str, out_features: int, shards: Sequence[Shard]) -> LayerAdapters:
        """Returns the weights for a layer that has shards of the inputs, and all outputs."""
        return self._added(LayerAdapters(self, [LinearPart(name, out_features, shards[0])], shards, [out_features]))

    @torch.inference_mode()
    def load(self, adapter: int, weights: Mapping[str, AdapterWeight]) -> None:
        """Replaces an adapter by `weights`, by the names of layers.

        Raises:
            ModelLoadError: a layer does not take adapters, or has another shape.
        """
        layers: dict[str, list[LayerAdapters]] = defaultdict(list)
        for layer in self._layers:
            for name in layer.names:
                layers[name].append(layer)
        unknown = sorted(weights.keys() - layers.keys())
        if unknown:
            raise ModelLoadError(f"The adapter has weights for {', '.join(unknown)}, which take no adapters here.")
        self.unload(adapter)
        num_used = self._num_used
        for name, weight in weights.items():
            for layer in layers[name]:
                layer.load(adapter, name, weight)
        self.version += self._num_used != num_used

    @torch.inference_mode()
    def unload(self, adapter: int) -> None:
        """Removes an adapter's weights."""
        for layer in self._layers:
            if layer.is_used:
                layer.clear(adapter)

    # ------------------------------------------------------------------------------------------------------- a step

    def enter_step(self, tokens: Tensor | None, wanted: Tensor | None = None) -> None:
        """Fills in the adapters of the tokens of a step, which is about to run.

        Args:
            tokens: [num_tokens] int64, on the device; -1 for a token without. None: no token has one. Recorded steps
                read the values again.
            wanted: [num_wanted] int64; indices of the tokens that the last layers see, if they do not see all.
        """
        self.is_active = tokens is not None
        self._step = self._tokens = tokens
        self._wanted = None if tokens is None or wanted is None else tokens[wanted]

    def enter_part(self, first: int, count: int) -> None:
        """Notes that the next layer sees `count` consecutive tokens of the step, from the index `first` on."""
        if self._step is not None:
            self._tokens, self._wanted = self._step[first : first + count], None

    def tokens(self, num_rows: int) -> Tensor:
        """Returns the adapters of the tokens that a layer with an input of `num_rows` sees."""
        assert self._tokens is not None, "see is_active"
        if num_rows == len(self._tokens):
            return self._tokens
        is_wanted = self._wanted is not None and num_rows == len(self._wanted)
        assert is_wanted, f"a layer with adapters sees {num_rows} rows, which are not the step's tokens"
        assert self._wanted is not None
        return self._wanted

    def _added(self, layer: LayerAdapters) -> LayerAdapters:
        self._layers.append(layer)
        return layer

    @property
    def _num_used(self) -> int:
        return sum(layer.is_used for layer in self._layers)
