"""Alternating updates (AltUp, arXiv:2301.13310): a layer computes one of several residual streams and corrects all."""

import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import NormStyle, RMSNorm


class AltUp:
    """Predicts a layer's streams from the previous ones, and corrects the predictions by the output of one stream.

    Streams are [num_streams, num_tokens, hidden]. Both steps weight streams by a token's own coefficients.
    """

    def __init__(
        self, context: ModelContext, name: str, hidden_size: int, norm: NormStyle, *, num_streams: int, active: int
    ) -> None:
        """Takes as `active` the stream that the layer computes."""
        self._ops = context.ops
        self._active = active
        self._factor = 1 / hidden_size
        self._norm = RMSNorm(context, f"{name}.router_norm", hidden_size, norm)
        self._router = ColumnLinear(context, [whole(f"{name}.modality_router", num_streams)], hidden_size)
        self._predictions = ColumnLinear(context, [whole(f"{name}.prediction_coefs", num_streams**2)], num_streams)
        self._corrections = ColumnLinear(context, [whole(f"{name}.correction_coefs", num_streams)], num_streams)

    def predict(self, streams: Tensor) -> Tensor:
        """Adds to each stream a mixture of all streams."""
        return self._ops.residual_streams.predict(streams, self._predictions(self._routed(streams[self._active])))

    def correct(self, predicted: Tensor, activated: Tensor) -> Tensor:
        """Adds to each stream a share of the difference between `activated` [num_tokens, hidden] and its prediction."""
        coefficients = self._corrections(self._routed(activated))
        return self._ops.residual_streams.correct(predicted, activated, coefficients, self._active)

    def _routed(self, x: Tensor) -> Tensor:
        """Computes the router's outputs [num_tokens, num_streams], between -1 and 1."""
        return self._ops.scale(self._router(self._norm(x)), self._factor, softcap=1.0)  # tanh


class StreamEnds:
    """Expands embeddings to streams, and collapses the last layer's streams to one hidden state."""

    def __init__(self, context: ModelContext, hidden_size: int, num_streams: int) -> None:
        names = [f"model.altup_projections.{index}" for index in range(num_streams - 1)]
        self._ops = context.ops
        self._expand = ColumnLinear(context, [whole(name, hidden_size) for name in names], hidden_size)
        self._collapse = [
            ColumnLinear(context, [whole(f"model.altup_unembed_projections.{index}", hidden_size)], hidden_size)
            for index in range(num_streams - 1)
        ]

    def expand(self, x: Tensor) -> Tensor:
        """Maps `x` [num_tokens, hidden] to [num_streams, num_tokens, hidden]."""
        return self._ops.residual_streams.expand(x, self._expand(x))

    def collapse(self, streams: Tensor) -> Tensor:
        """Averages the streams, projected and scaled to the magnitude of the first: [num_tokens, hidden]."""
        total = first = streams[0]
        for index, layer in enumerate(self._collapse):
            total = self._ops.add(total, self._ops.residual_streams.match_magnitude(layer(streams[index + 1]), first))
        return self._ops.scale(total, 1 / len(streams))


def drop_unwanted(streams: Tensor, wanted: Tensor) -> Tensor:
    """Returns the streams of the tokens `wanted` [num_wanted] int64."""
    return torch.index_select(streams, 1, wanted)
