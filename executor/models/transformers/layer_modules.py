"""Our layers as torch modules, which replace those of a Transformers model."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.executor.layers.adapters import LayerAdapters
from quire.executor.layers.attention.expansion import LatentExpansion
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts import experts as layers
from quire.executor.layers.linear import ColumnLinear, GatedLinear, RowLinear
from quire.executor.weights.packing import ReadLinear
from quire.ops.activations import PlainActivation
from quire.ops.backend import Backend


class LayerModule(nn.Module):
    """One of our layers; a program has it as one call."""

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        """The places of the layer's adapters."""
        return []

    def num_rows(self, x: Tensor) -> int:
        """Returns the number of rows that an input `x` has for the adapters."""
        return x.numel() // x.shape[-1]


def _some(adapters: LayerAdapters | None) -> list[LayerAdapters]:
    return [] if adapters is None else [adapters]


class WholeLinear(LayerModule):
    """A linear layer in float32 that every rank has whole: [..., in] → [..., out]."""

    def __init__(self, context: ModelContext, read: ReadLinear) -> None:
        super().__init__()
        self._ops = context.ops
        self._packed = context.packing.linear(read)

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.linear(x.reshape(-1, x.shape[-1]), self._packed).view(*x.shape[:-1], -1)


class Linear(LayerModule):
    """A linear layer: [..., in] → [..., out].

    Attributes:
        in_features: inputs on this rank.
        out_features: outputs on this rank.
    """

    def __init__(self, layer: ColumnLinear | RowLinear, in_features: int, out_features: int) -> None:
        super().__init__()
        self._layer = layer
        self.in_features = in_features
        self.out_features = out_features

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        return _some(self._layer.adapters)

    def forward(self, x: Tensor) -> Tensor:
        return self._layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class Patches(LayerModule):
    """A convolution whose steps are as long as its kernel: a linear layer of patches that do not overlap.

    Attributes:
        weight: without memory; some classes look at its dtype.
    """

    def __init__(self, context: ModelContext, read: ReadLinear, kernel: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self._ops = context.ops
        self._packed = context.packing.linear(read)
        self._kernel = tuple(kernel)
        self.weight = torch.zeros((), dtype=dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [n, channels, *sizes] to [n, out, *numbers of patches]."""
        num_dims = len(self._kernel)
        counts = [size // step for size, step in zip(x.shape[2:], self._kernel, strict=True)]
        for dim, (count, step) in enumerate(zip(counts, self._kernel, strict=True)):
            x = x.narrow(2 + 2 * dim, 0, count * step).unflatten(2 + 2 * dim, (count, step))
        places, inner = range(2, 2 + 2 * num_dims, 2), range(3, 3 + 2 * num_dims, 2)
        rows = x.permute(0, *places, 1, *inner).flatten(num_dims + 1).flatten(0, num_dims)
        out = self._ops.linear(rows, self._packed).view(x.shape[0], *counts, -1)
        return out.movedim(-1, 1)


class GatheredLinear(LayerModule):
    """A linear layer whose outputs are divided among ranks and gathered on each."""

    def __init__(self, context: ModelContext, layer: ColumnLinear) -> None:
        super().__init__()
        self._layer = layer
        self._group = context.group

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        return _some(self._layer.adapters)

    def forward(self, x: Tensor) -> Tensor:
        out = self._group.all_gather(self._layer(x.reshape(-1, x.shape[-1])))
        return out.view(*x.shape[:-1], -1)


class SplitInputLinear(LayerModule):
    """A row layer that takes whole inputs and uses its rank's part of them."""

    def __init__(self, layer: RowLinear, start: int, stop: int) -> None:
        super().__init__()
        self._layer = layer
        self._own = slice(start, stop)

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        return _some(self._layer.adapters)

    def forward(self, x: Tensor) -> Tensor:
        return self._layer(x.reshape(-1, x.shape[-1])[:, self._own]).view(*x.shape[:-1], -1)


class FusedLinear:
    """Linear layers with the same input, in one product. The first call computes all of them."""

    def __init__(self, layer: ColumnLinear, sizes: Sequence[int]) -> None:
        self._layer = layer
        self.sizes = list(sizes)
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        """The place of the layers' adapters."""
        return _some(self._layer.adapters)

    def __call__(self, x: Tensor, index: int) -> Tensor:
        """Returns the outputs of layer `index`, [..., its size]."""
        out = self._outputs[index] if x is self._input else None
        if out is None:
            self._input, self._outputs = x, list(self.whole(x).split(self.sizes, dim=-1))
            out = self._outputs[index]
            assert out is not None
        self._outputs[index] = None
        if not any(other is not None for other in self._outputs):
            self._input = None  # the memory of inputs and outputs is not held any longer than needed
        return out

    def whole(self, x: Tensor) -> Tensor:
        """Returns the outputs of all layers, one after another."""
        return self._layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class FusedPart(LayerModule):
    """One of the layers of a `FusedLinear`."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self.fused = fused
        self.index = index

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        return self.fused.adapters

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x, self.index)


class FusedWhole(LayerModule):
    """All layers of a `FusedLinear`: [..., in] → [..., sum of their outputs]."""

    def __init__(self, fused: FusedLinear) -> None:
        super().__init__()
        self._fused = fused

    def forward(self, x: Tensor) -> Tensor:
        return self._fused.whole(x)


class MLP(LayerModule):
    """Computes `down(activation(gate(x)) * up(x))`."""

    def __init__(self, gate_up: GatedLinear, down: RowLinear) -> None:
        super().__init__()
        self._gate_up = gate_up
        self._down = down

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        return [*_some(self._gate_up.adapters), *_some(self._down.adapters)]

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        return self._down(self._gate_up(x.reshape(-1, x.shape[-1]))).view(x.shape)


class Experts(LayerModule):
    """Sums each token's experts, weighted: [..., hidden], ids and weights [num_tokens, top_k] → [..., hidden]."""

    def __init__(self, context: ModelContext, experts: layers.Experts, num_experts: int) -> None:
        super().__init__()
        self._experts = experts
        self._group = context.group
        self.num_experts = num_experts
        self.activation_size = experts.activation_size

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        return self._experts.adapters

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        weights = weights if weights.dtype == torch.float32 else weights.float()
        out = self._experts.partial(x.reshape(-1, x.shape[-1]), ids, weights)
        return self._group.all_reduce(out).view(x.shape)


class Expansion(LayerModule):
    """Replaces a layer that expands latents [..., rank] into all heads' keys and values, and returns zeros.

    Attention applies the expansion itself, to the latents that are held until then.

    Attributes:
        latent: the layer's weight.
        shared_size: elements of the key that all heads share, after their own.
    """

    def __init__(self, latent: LatentExpansion, shared_size: int) -> None:
        super().__init__()
        self.latent = latent
        self.shared_size = shared_size
        self._latents: Tensor | None = None

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        return self.latent.adapters

    def forward(self, latents: Tensor) -> Tensor:
        self._latents = latents
        return latents.new_zeros(()).expand(*latents.shape[:-1], self.latent.size)

    def take(self) -> Tensor:
        """Returns the latents of the last call, and drops them."""
        latents, self._latents = self._latents, None
        assert latents is not None
        return latents


class Activation(LayerModule):
    """A class's elementwise activation function that is one of ours; a program calls ours."""

    def __init__(self, own: nn.Module, activation: PlainActivation) -> None:
        super().__init__()
        self._own = own
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self._own(x)


class PlainNorm(LayerModule):
    """A class's root-mean-square norm without a weight; a program calls ours."""

    def __init__(self, own: nn.Module, eps: float) -> None:
        super().__init__()
        self._own = own
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self._own(x)


class LayerNorm(LayerModule):
    """Layer norm over the last dimension of [..., size]."""

    def __init__(self, ops: Backend, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self._ops = ops
        self.weight = weight  # some classes look at its dtype
        self._bias = bias
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()  # those of a tower may be columns of an image
        return self._ops.layer_norm(rows, self.weight, self._bias, self._eps).view(x.shape)


class RMSNorm(LayerModule):
    """Root-mean-square norm over the last dimension of [..., size]."""

    def __init__(self, ops: Backend, weight: Tensor, eps: float) -> None:
        super().__init__()
        self._ops = ops
        self.weight = weight  # some classes look at its dtype
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() in (3, 4) and len(x) == 1:  # all tokens, perhaps with heads that lie apart in memory
            return self._ops.rms_norm(x[0], self.weight, self.eps).view(x.shape)
        return self._ops.rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), self.weight, self.eps).view(x.shape)

    def in_float32(self, x: Tensor) -> Tensor:
        """Computes the formula for comparisons, which run on the CPU."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.cpu().float()


class Embedding(LayerModule):
    """Looks up token ids in the table and multiplies by `scale`. Each rank holds some rows."""

    def __init__(
        self, context: ModelContext, rows: Tensor, start: int, scale: float, adapters: LayerAdapters | None = None
    ) -> None:
        super().__init__()
        self._ops = context.ops
        self._group = context.group
        self.weight = rows  # some classes look at its device
        self._start = start
        self._scale = scale
        self._adapters = adapters
        self._row: Tensor | None = None

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        return _some(self._adapters)

    def num_rows(self, x: Tensor) -> int:
        return x.numel()

    @contextlib.contextmanager
    def alone(self, row: Tensor) -> Iterator[None]:
        """Makes this the row of all tokens, [hidden], so that a rank looks them up without the others."""
        self._row = row
        try:
            yield
        finally:
            self._row = None

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._row is not None:
            return self._row.expand(*token_ids.shape, -1).clone()
        return self._embed(token_ids.reshape(-1)).view(*token_ids.shape, -1)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            rows = self._ops.take_rows(self.weight, token_ids, self._scale)
            return rows if self._adapters is None else self._adapters.add_rows(token_ids, rows)
        local = token_ids - self._start
        is_elsewhere = (local < 0) | (local >= len(self.weight))
        local = local.masked_fill(is_elsewhere, 0)
        rows = self._ops.take_rows(self.weight, local, self._scale).masked_fill(is_elsewhere.unsqueeze(1), 0)
        if self._adapters is not None:
            rows = self._adapters.add_rows(local, rows, is_elsewhere)
        return self._group.all_reduce(rows)


class Head(LayerModule):
    """Computes the logits of the whole vocabulary from [..., hidden]. Each rank computes a part of them."""

    def __init__(
        self, context: ModelContext, read: ReadLinear, vocab_size: int, adapters: LayerAdapters | None = None
    ) -> None:
        super().__init__()
        self._ops = context.ops
        self._group = context.group
        self._vocab_size = vocab_size
        self._packed = context.packing.linear(read)
        self._adapters = adapters

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        return _some(self._adapters)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        logits = self._ops.linear(rows, self._packed)
        if self._adapters is not None:
            logits = self._adapters.add(rows, logits)
        logits = self._group.all_gather(logits)
        return logits[:, : self._vocab_size].view(*x.shape[:-1], -1)


def padded(rows: Tensor, count: int) -> Tensor:
    """Pads `rows` [n, ...] with zeros to [count, ...]."""
    missing = count - len(rows)
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
