"""Penalties on tokens seen before, by OpenAI's formulas (presence, frequency) and CTRL's (repetition).

logit /= repetition if logit > 0 else 1 / repetition      tokens of prompt or output (arXiv:1909.05858, section 4.1)
logit -= frequency * count + presence * (count > 0)       count: occurrences in the output so far
"""

import numpy as np
import torch

from quire.core.protocol import NewSlot
from quire.executor.sampling.feature import SampleBatch


class Penalties:
    """Reads the tokens seen from the request table, so it needs no counts of its own that could go stale."""

    def __init__(self, max_num_seqs: int) -> None:
        self._repetition = np.ones(max_num_seqs, np.float32)
        self._frequency = np.zeros(max_num_seqs, np.float32)
        self._presence = np.zeros(max_num_seqs, np.float32)

    def admit(self, request: NewSlot) -> None:
        params = request.sampling
        self._repetition[request.slot] = params.repetition_penalty
        self._frequency[request.slot] = params.frequency_penalty
        self._presence[request.slot] = params.presence_penalty

    def used(self, batch: SampleBatch) -> np.ndarray:
        slots = batch.slots
        return (self._repetition[slots] != 1) | (self._frequency[slots] != 0) | (self._presence[slots] != 0)

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        table, device = batch.table, logits.device
        longest = int(batch.positions.max())
        token_ids = table.token_ids[torch.from_numpy(batch.slots).to(device), :longest].long()  # [num_rows, longest]
        column = torch.arange(longest, device=device)
        known = column < torch.from_numpy(batch.positions).to(device).unsqueeze(1)
        generated = known & (column >= batch.column(table.num_prompt_tokens))

        if (self._repetition[batch.slots] != 1).any():
            seen = _counts(token_ids, known, logits.shape[1]) > 0
            repetition = batch.column(self._repetition)
            logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        counts = _counts(token_ids, generated, logits.shape[1])
        logits -= batch.column(self._frequency) * counts
        logits -= batch.column(self._presence) * (counts > 0)
        return logits


def _counts(token_ids: torch.Tensor, counted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Occurrences of each id among the places of its row that are `counted`: [num_rows, vocab_size] float32."""
    counts = torch.zeros(token_ids.shape[0], vocab_size, device=token_ids.device)
    return counts.scatter_add_(1, token_ids, counted.float())
