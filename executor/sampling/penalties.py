"""Penalties on tokens seen before, by OpenAI's formulas (presence, frequency) and CTRL's (repetition).

logit /= repetition if logit > 0 else 1 / repetition      tokens of prompt or output (arXiv:1909.05858, section 4.1)
logit -= frequency * count + presence * (count > 0)       count: occurrences in the output so far
"""

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import LogitsFeature, SampleBatch


class Penalties(LogitsFeature):
    """Reads the tokens seen from the request table, so that there are no separate counts that could go stale."""

    def __init__(self, max_num_seqs: int) -> None:
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)

    def admit(self, request: NewSlot) -> bool:
        params = request.sampling
        self.repetition[request.slot] = params.repetition_penalty
        self.frequency[request.slot] = params.frequency_penalty
        self.presence[request.slot] = params.presence_penalty
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    def used(self, batch: SampleBatch) -> np.ndarray:
        slots = batch.slots
        return (self.repetition[slots] != 1) | (self.frequency[slots] != 0) | (self.presence[slots] != 0)

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        table, device = batch.table, logits.device
        longest = int(batch.positions.max())
        token_ids = table.token_ids[batch.on_device(batch.slots), :longest].long()  # [num_rows, longest]
        column = torch.arange(longest, device=device)
        ends, starts = batch.on_device(batch.positions).unsqueeze(1), batch.column(table.num_unnamed)
        known = (column >= starts) & (column < ends)
        generated = known & (column >= batch.column(table.num_prompt_tokens))
        # Unknown places repeat the row's last token, which is harmless: a repeated token gets the same value again.
        token_ids = torch.where(known, token_ids, token_ids.gather(1, ends - 1))

        counts = torch.zeros_like(logits).scatter_add_(1, token_ids, generated.float()).gather(1, token_ids)
        seen = logits.gather(1, token_ids)
        repetition = torch.where(starts < ends, batch.column(self.repetition), 1.0)  # 1 where no token is known
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        seen -= batch.column(self.frequency) * counts + batch.column(self.presence) * (counts > 0)
        return logits.scatter_(1, token_ids, seen)
