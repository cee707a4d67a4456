"""allowed_token_ids: nothing else can be sampled."""

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import Mask, SampleBatch


class AllowedTokens(Mask):
    """Puts the logits of allowed tokens back into rows of -inf."""

    def __init__(self, max_num_seqs: int) -> None:
        self._used = np.zeros(max_num_seqs, bool)
        self._ids: dict[int, np.ndarray] = {}  # slot to the ids that are allowed

    def admit(self, request: NewSlot) -> bool:
        ids = request.sampling.allowed_token_ids
        self._used[request.slot] = ids is not None
        self._ids.pop(request.slot, None)
        if ids is not None:
            self._ids[request.slot] = np.array(ids, np.int64)
        return ids is not None

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self._used[batch.slots]

    def apply(self, logits: torch.Tensor, rows: np.ndarray, batch: SampleBatch) -> None:
        allowed = [self._ids[slot] for slot in batch.slots.tolist()]
        places = np.repeat(rows, [len(ids) for ids in allowed])
        index = batch.on_device(np.stack([places, np.concatenate(allowed)]))
        kept = logits[index[0], index[1]]
        logits[batch.on_device(rows)] = -torch.inf
        logits[index[0], index[1]] = kept
