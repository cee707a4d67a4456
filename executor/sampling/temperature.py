"""Temperature: logits divided by it, so that a larger one flattens the distribution."""

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import LogitsFeature, SampleBatch

_HOTTEST = 1e30
"""Larger temperatures give the same uniform distribution, and infinity would turn masked logits into NaN."""


class Temperature(LogitsFeature):
    """Scales the logits of rows that are not greedy."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.ones(max_num_seqs, np.float32)

    def admit(self, request: NewSlot) -> bool:
        params = request.sampling
        self.temperature[request.slot] = 1.0 if params.greedy else min(params.temperature, _HOTTEST)
        return not params.greedy and params.temperature != 1

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self.temperature[batch.slots] != 1.0

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        return logits.div_(batch.column(self.temperature))
