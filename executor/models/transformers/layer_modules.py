"""Our layers as torch modules, which replace those of a Transformers model."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts import experts as layers
from quire.executor.layers.linear import ColumnLinear, GatedLinear, RowLinear
from quire.executor.weights.packing import ReadLinear
from quire.ops.activations import PlainActivation
from quire.ops.backend import Backend


class LayerModule(nn.Module):
    """One of our layers; a program has it as one call."""


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

    def forward(self, x: Tensor) -> Tensor:
        return self._layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class GatheredLinear(LayerModule):
    """A linear layer whose outputs are divided among ranks and gathered on each."""

    def __init__(self, context: ModelContext, layer: ColumnLinear) -> None:
        super().__init__()
        self._layer = layer
        self._group = context.group

    def forward(self, x: Tensor) -> Tensor:
        out = self._group.all_gather(self._layer(x.reshape(-1, x.shape[-1])))
        return out.view(*x.shape[:-1], -1)


class SplitInputLinear(LayerModule):
    """A row layer that takes whole inputs and uses its rank's part of them."""

    def __init__(self, layer: RowLinear, start: int, stop: int) -> None:
        super().__init__()
        self._layer = layer
        self._own = slice(start, stop)

    def forward(self, x: Tensor) -> Tensor:
        return self._layer(x.reshape(-1, x.shape[-1])[:, self._own]).view(*x.shape[:-1], -1)


class FusedLinear:
    """Linear layers with the same input, in one product. The first call computes all of them."""

    def __init__(self, layer: ColumnLinear, sizes: Sequence[int]) -> None:
        self._layer = layer
        self.sizes = list(sizes)
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

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

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        weights = weights if weights.dtype == torch.float32 else weights.float()
        out = self._experts.partial(x.reshape(-1, x.shape[-1]), ids, weights)
        return self._group.all_reduce(out).view(x.shape)


class Expansion(LayerModule):
    """Replaces a layer that expands latents [..., rank] into all heads' keys and values, and returns zeros.

    Attention applies the expansion itself, to the latents that are held until then.

    Attributes:
        to_latent: [heads, size of a key without the shared part, rank].
        to_values: [heads, rank, size of a value].
        shared_size: elements of the key that all heads share, after their own.
    """

    def __init__(self, to_latent: Tensor, to_values: Tensor, shared_size: int) -> None:
        super().__init__()
        self.to_latent = to_latent
        self.to_values = to_values
        self.shared_size = shared_size
        self._latents: Tensor | None = None

    @property
    def rank(self) -> int:
        """Elements of a latent."""
        return self.to_latent.shape[2]

    def forward(self, latents: Tensor) -> Tensor:
        self._latents = latents
        heads, size, _ = self.to_latent.shape
        return latents.new_zeros(()).expand(*latents.shape[:-1], heads * (size + self.to_values.shape[2]))

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
        return self._ops.layer_norm(x.reshape(-1, x.shape[-1]), self.weight, self._bias, self._eps).view(x.shape)


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
        return self._ops.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)

    def in_float32(self, x: Tensor) -> Tensor:
        """Computes the formula for comparisons, which run on the CPU."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.cpu().float()


class Embedding(LayerModule):
    """Looks up token ids in the table and multiplies by `scale`. Each rank holds some rows."""

    def __init__(self, context: ModelContext, rows: Tensor, start: int, scale: float) -> None:
        super().__init__()
        self._ops = context.ops
        self._group = context.group
        self.weight = rows  # some classes look at its device
        self._start = start
        self._scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        return self._embed(token_ids.reshape(-1)).view(*token_ids.shape, -1)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._ops.take_rows(self.weight, token_ids, self._scale)
        local = token_ids - self._start
        is_elsewhere = (local < 0) | (local >= len(self.weight))
        rows = self._ops.take_rows(self.weight, local.masked_fill(is_elsewhere, 0), self._scale)
        return self._group.all_reduce(rows.masked_fill(is_elsewhere.unsqueeze(1), 0))


class Head(LayerModule):
    """Computes the logits of the whole vocabulary from [..., hidden]. Each rank computes a part of them."""

    def __init__(self, context: ModelContext, read: ReadLinear, vocab_size: int) -> None:
        super().__init__()
        self._ops = context.ops
        self._group = context.group
        self._vocab_size = vocab_size
        self._packed = context.packing.linear(read)

    def forward(self, x: Tensor) -> Tensor:
        logits = self._group.all_gather(self._ops.linear(x.reshape(-1, x.shape[-1]), self._packed))
        return logits[:, : self._vocab_size].view(*x.shape[:-1], -1)


def padded(rows: Tensor, count: int) -> Tensor:
    """Pads `rows` [n, ...] with zeros to [count, ...]."""
    missing = count - len(rows)
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
