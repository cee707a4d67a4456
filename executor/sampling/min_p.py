"""min-p: drop tokens whose probability is below a share of the likeliest token's (arXiv:2407.01082)."""

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import LogitsFeature, SampleBatch
from quire.ops.sampling import SamplingOperations


class MinP(LogitsFeature):
    """Works on logits: p < min_p * p_max is the same as logit < logit_max + log(min_p)."""

    def __init__(self, max_num_seqs: int, ops: SamplingOperations) -> None:
        self._ops = ops
        self.log_min_p = np.full(max_num_seqs, -np.inf, np.float32)

    def admit(self, request: NewSlot) -> bool:
        params = request.sampling
        used = params.min_p > 0 and not params.greedy
        self.log_min_p[request.slot] = np.log(params.min_p) if used else -np.inf
        return used

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self.log_min_p[batch.slots] > -np.inf

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        return self._ops.keep_min_p(logits, self.log_min_p[batch.slots])
