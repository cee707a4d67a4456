"""logit_bias: values that a request adds to the logits of some tokens."""

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import LogitsFeature, SampleBatch


class LogitBias(LogitsFeature):
    """Adds the biases before any other feature, so that masks and penalties see biased logits."""

    def __init__(self, max_num_seqs: int) -> None:
        self._used = np.zeros(max_num_seqs, bool)
        self._entries: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # slot to (ids, biases)

    def admit(self, request: NewSlot) -> bool:
        bias = request.sampling.logit_bias
        self._used[request.slot] = bool(bias)
        self._entries.pop(request.slot, None)
        if bias:
            self._entries[request.slot] = (np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))
        return bool(bias)

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self._used[batch.slots]

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        entries = [self._entries[slot] for slot in batch.slots.tolist()]
        rows = np.repeat(np.arange(len(entries)), [len(ids) for ids, _ in entries])
        index = batch.on_device(np.stack([rows, np.concatenate([ids for ids, _ in entries])]))
        biases = batch.on_device(np.concatenate([biases for _, biases in entries]))
        return logits.index_put_((index[0], index[1]), biases, accumulate=True)
