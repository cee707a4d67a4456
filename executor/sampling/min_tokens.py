"""min_tokens: until a request has generated that many tokens, nothing that would end it can be sampled."""

from collections.abc import Collection

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import Mask, SampleBatch


class MinTokens(Mask):
    """Masks end-of-sequence tokens and the request's own stop tokens."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = set(eos_token_ids)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._ends: dict[int, np.ndarray] = {}  # slot to the ids that are masked

    def admit(self, request: NewSlot) -> bool:
        params = request.sampling
        self._min_tokens[request.slot] = params.min_tokens
        if params.min_tokens:
            ends = self._eos_token_ids.union(params.stop_token_ids or ())
            self._ends[request.slot] = np.array([i for i in sorted(ends) if 0 <= i < self._vocab_size], np.int64)
        return params.min_tokens > 0

    def used(self, batch: SampleBatch) -> np.ndarray:
        return batch.positions - batch.num_prompt_tokens < self._min_tokens[batch.slots]

    def apply(self, logits: torch.Tensor, rows: np.ndarray, batch: SampleBatch) -> None:
        ends = [self._ends[slot] for slot in batch.slots.tolist()]
        places = np.repeat(rows, [len(ids) for ids in ends])
        index = batch.on_device(np.stack([places, np.concatenate(ends)]))
        logits[index[0], index[1]] = -torch.inf
