"""Manifold-constrained hyper-connections (arXiv:2512.24880): several residual streams, mixed around each block."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.executor.layers.context import ModelContext


class HyperConnection:
    """Computes a block's input from the streams, and adds its output to all of them.

    The weights of both depend on the token. Those that mix streams have rows and columns that sum to one, by Sinkhorn
    and Knopp's iteration. Everything is computed in float32.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        *,
        num_streams: int,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> None:
        """`eps` is added to weights and their sums, `norm_eps` to the mean square of all streams."""
        size = (2 + num_streams) * num_streams
        self._num_streams = num_streams
        self._iterations = iterations
        self._eps = eps
        self._norm_eps = norm_eps
        self._weight = context.read(f"{name}_fn", (size, num_streams * hidden_size), dtype=torch.float32)
        self._base = context.read(f"{name}_base", (size,), dtype=torch.float32)
        scale = context.read(f"{name}_scale", (3,), dtype=torch.float32)
        self._scale = scale.repeat_interleave(
            torch.tensor([num_streams, num_streams, num_streams**2], device=scale.device), output_size=size
        )

    def collapse(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the block's input, and the arguments of `expand`, from `streams` [num_tokens, num_streams, hidden].

        Returns (shares of the block's output [num_tokens, num_streams], mixture [num_tokens, num_streams, num_streams],
        input [num_tokens, hidden]).
        """
        num, eps = self._num_streams, self._eps
        weights = _mean_square_linear(streams, self._weight, self._norm_eps) * self._scale + self._base
        take, give, mix = weights.split((num, num, num * num), dim=-1)
        mix = mix.unflatten(-1, (num, num)).softmax(dim=-1) + eps
        mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self._iterations - 1):
            mix = mix / (mix.sum(dim=-1, keepdim=True) + eps)
            mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
        return 2 * give.sigmoid(), mix, _weighted(streams, take.sigmoid() + eps)

    def expand(self, streams: Tensor, share: Tensor, mix: Tensor, out: Tensor) -> Tensor:
        """Returns the streams after a block whose output is `out` [num_tokens, hidden]."""
        mixed = torch.bmm(mix.transpose(1, 2), streams.float())
        return torch.baddbmm(mixed, share.unsqueeze(2), out.float().unsqueeze(1)).to(streams.dtype)


class StreamHead:
    """Sums all streams, weighted for each token."""

    def __init__(
        self, context: ModelContext, name: str, hidden_size: int, *, num_streams: int, eps: float, norm_eps: float
    ) -> None:
        """`eps` and `norm_eps` as for `HyperConnection`."""
        self._eps = eps
        self._norm_eps = norm_eps
        self._weight = context.read(f"{name}_fn", (num_streams, num_streams * hidden_size), dtype=torch.float32)
        self._base = context.read(f"{name}_base", (num_streams,), dtype=torch.float32)
        self._scale = context.read(f"{name}_scale", (1,), dtype=torch.float32)

    def __call__(self, streams: Tensor) -> Tensor:
        """[num_tokens, num_streams, hidden] → [num_tokens, hidden]."""
        weights = _mean_square_linear(streams, self._weight, self._norm_eps) * self._scale + self._base
        return _weighted(streams, weights.sigmoid() + self._eps)


def _mean_square_linear(streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Applies a linear layer to all streams of a token together, normalized to a mean square of one."""
    flat = streams.flatten(1).float()
    return F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps), weight)


def _weighted(streams: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
