"""min-p: drop tokens whose probability is below a share of the likeliest token's (arXiv:2407.01082)."""

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.drop_below import drop_below
from quire.executor.sampling.feature import Feature, SampleBatch


class MinP(Feature):
    """Works on logits: p < min_p * p_max is the same as logit < logit_max + log(min_p)."""

    def __init__(self, max_num_seqs: int) -> None:
        self._log_min_p = np.full(max_num_seqs, -np.inf, np.float32)

    def admit(self, request: NewSlot) -> bool:
        params = request.sampling
        used = params.min_p > 0 and not params.greedy
        self._log_min_p[request.slot] = np.log(params.min_p) if used else -np.inf
        return used

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self._log_min_p[batch.slots] > -np.inf

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        least = logits.amax(-1, keepdim=True) + batch.column(self._log_min_p)
        return drop_below(logits, logits, least)
