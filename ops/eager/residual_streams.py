"""The operations of residual streams in plain torch."""

import torch
from torch import Tensor

from quire.ops.residual_streams import MIN_SQUARE, ResidualStreamOperations


class EagerResidualStreams(ResidualStreamOperations):
    """Residual streams. They are added one after another, so that no sum depends on the number of tokens."""

    def match_magnitude(self, x: Tensor, like: Tensor) -> Tensor:
        full = x.float()
        factor = _mean_square(like.float()).div_(_mean_square(full).clamp_(min=MIN_SQUARE)).sqrt_()
        return (full * factor).to(x.dtype)

    def expand(self, x: Tensor, projected: Tensor) -> Tensor:
        parts = projected.unflatten(1, (-1, x.shape[1])).unbind(1)
        return torch.stack([x, *(self.match_magnitude(part, x) for part in parts)])

    def predict(self, streams: Tensor, coefficients: Tensor) -> Tensor:
        full, num_streams = streams.float(), len(streams)
        factors = coefficients.float().t().view(num_streams, num_streams, -1, 1)
        out = full.clone()
        for number in range(num_streams):
            out += factors[:, number] * full[number]
        return out.to(streams.dtype)

    def correct(self, streams: Tensor, activated: Tensor, coefficients: Tensor, active: int) -> Tensor:
        full = streams.float()
        factors = (coefficients.float() + 1).t().unsqueeze(2)
        return (full + factors * (activated.float() - full[active])).to(streams.dtype)

    def add_to_others(self, streams: Tensor, x: Tensor) -> None:
        streams[1:] += x

    def keep_outliers(self, gates: Tensor, whole: Tensor, deviations: float) -> None:
        full = whole.float()
        mean = full.mean(dim=-1, keepdim=True)
        cutoff = mean + deviations * _mean_square(full - mean).sqrt_()
        gates.copy_((gates.float() - cutoff).relu_())


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean(dim=-1, keepdim=True)
