"""top-k and top-p: keep the likeliest tokens, by number and by probability mass.

Both find the least value that stays and drop smaller ones. Tokens exactly as likely as that value stay too, so the
result depends only on the row's values, never on the order of a sort.
"""

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.drop_below import drop_below
from quire.executor.sampling.feature import Feature, SampleBatch

FIRST_LOOK = 256
"""Tokens among which the top-p cut is searched first: nearly always enough, and much less work than sorting them all.
"""
_WIDER = 64


class TopK(Feature):
    """Keeps the k likeliest tokens."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._top_k = np.full(max_num_seqs, vocab_size, np.int64)

    def admit(self, request: NewSlot) -> bool:
        params = request.sampling
        used = params.top_k > 0 and not params.greedy
        self._top_k[request.slot] = min(params.top_k, self._vocab_size) if used else self._vocab_size
        return used

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self._top_k[batch.slots] < self._vocab_size

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        likeliest = logits.topk(int(self._top_k[batch.slots].max()), dim=-1).values
        least = likeliest.gather(1, batch.column(self._top_k) - 1)
        return drop_below(logits, logits, least)


class TopP(Feature):
    """Keeps the smallest set of likeliest tokens whose probability reaches top_p; at least one."""

    def __init__(self, max_num_seqs: int, first_look: int = FIRST_LOOK) -> None:
        """The cut is sought among the `first_look` likeliest tokens first; the host then checks whether it was there.

        If `first_look` is the size of the vocabulary, the host need not check.
        """
        self._first_look = first_look
        self._top_p = np.ones(max_num_seqs, np.float64)

    def admit(self, request: NewSlot) -> bool:
        params = request.sampling
        self._top_p[request.slot] = 1.0 if params.greedy else params.top_p
        return params.top_p < 1 and not params.greedy

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self._top_p[batch.slots] < 1.0

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        probs = logits.softmax(-1)
        least = _least_kept(probs, batch.column(self._top_p), self._first_look)
        return drop_below(logits, probs, least)


def _least_kept(probs: torch.Tensor, top_p: torch.Tensor, look: int) -> torch.Tensor:
    """The least of `probs` [num_rows, vocab_size] that each row keeps for its `top_p` [num_rows, 1]: like `top_p`.

    Looks at the `look` likeliest tokens, and at more only for rows so flat that those do not reach `top_p`.
    """
    likeliest = probs.topk(min(look, probs.shape[1]), dim=-1).values
    reached = likeliest.cumsum(-1, dtype=torch.float64)
    num_kept = (reached - likeliest < top_p).sum(-1, keepdim=True).clamp_(min=1)
    least = likeliest.gather(1, num_kept - 1)
    if look < probs.shape[1]:
        (flat,) = torch.where(reached[:, -1] < top_p.squeeze(1))
        if len(flat):
            least[flat] = _least_kept(probs[flat], top_p[flat], look * _WIDER)
    return least
