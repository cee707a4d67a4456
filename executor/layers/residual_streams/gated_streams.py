"""Qwen4-Exp's hyper-connections (after arXiv:2409.19606): residual streams, mixed for each block by low-rank gates."""

from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import NormStyle


class StreamMixer:
    """The mean of all streams. Each is normalized separately, and each element has a gate that depends on the token."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        style: NormStyle,
        *,
        num_streams: int,
        rank: int,
        injects: bool = False,
    ) -> None:
        """Takes the `rank` of the gates. With `injects`, a token has a factor for each stream, too."""
        size = num_streams * hidden_size
        self._ops = context.ops
        self._num_streams = num_streams
        self._rank = rank
        self._norm = style.read(context, f"{name}.hc_norm", size).view(num_streams, hidden_size)
        self._eps = style.eps
        inner = [whole(f"{name}.input_mix_weight_down", rank)]
        if injects:
            inner.append(whole(f"{name}.block_inject_weight", num_streams))
        self._down = ColumnLinear(context, inner, size)
        self._up = ColumnLinear(context, [whole(f"{name}.input_mix_weight_up", size)], rank)
        self.activation_size = 3 * size + rank + num_streams

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, num_streams, hidden] → mean [num_tokens, hidden], factors [num_tokens, num_streams or 0]."""
        normed = self._ops.rms_norm(streams, self._norm, self._eps)
        inner = self._down(normed.flatten(1)) / self._num_streams
        gates = self._up(self._ops.activate(inner[:, : self._rank].contiguous(), "silu")).sigmoid()
        mean = (gates.view_as(normed) * normed).mean(dim=1)
        return mean, 2 * inner[:, self._rank :].sigmoid()


def inject(streams: Tensor, factors: Tensor, out: Tensor) -> Tensor:
    """Adds a block's output [num_tokens, hidden] to `streams`, times the factors of `StreamMixer`."""
    return streams + out.unsqueeze(1) * factors.unsqueeze(2)
