"""top-k and top-p: keep the likeliest tokens, by number and by probability mass."""

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import LogitsFeature, SampleBatch
from quire.ops.sampling import SamplingOperations


class TopK(LogitsFeature):
    """Keeps the k likeliest tokens."""

    def __init__(self, max_num_seqs: int, vocab_size: int, ops: SamplingOperations) -> None:
        self._ops = ops
        self.vocab_size = vocab_size
        self.top_k = np.full(max_num_seqs, vocab_size, np.int64)

    def admit(self, request: NewSlot) -> bool:
        params = request.sampling
        used = params.top_k > 0 and not params.greedy
        self.top_k[request.slot] = min(params.top_k, self.vocab_size) if used else self.vocab_size
        return used

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self.top_k[batch.slots] < self.vocab_size

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        return self._ops.keep_top_k(logits, self.top_k[batch.slots])


class TopP(LogitsFeature):
    """Keeps the smallest set of likeliest tokens whose probability reaches top_p; at least one."""

    def __init__(self, max_num_seqs: int, ops: SamplingOperations) -> None:
        self._ops = ops
        self.top_p = np.ones(max_num_seqs, np.float64)

    def admit(self, request: NewSlot) -> bool:
        params = request.sampling
        self.top_p[request.slot] = 1.0 if params.greedy else params.top_p
        return params.top_p < 1 and not params.greedy

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self.top_p[batch.slots] < 1.0

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        return self._ops.keep_top_p(logits, self.top_p[batch.slots])
