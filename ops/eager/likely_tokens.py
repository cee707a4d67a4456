"""Rows of logits without their unlikely tokens: top-k, top-p and min-p.

All find the least value that stays and drop smaller ones. Tokens exactly as likely as that value stay too, so the
result depends only on the row's values, never on the order of a sort.
"""

import torch
from torch import Tensor

_FIRST_LOOK = 256
"""Tokens among which the top-p cut is searched first: nearly always enough, and much less work than sorting them all.
"""
_WIDER = 64


def keep_min_p(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """See `SamplingOperations.keep_min_p`; `log_min_p` [num_rows, 1] is on the device."""
    return _drop_below(logits, logits, logits.amax(-1, keepdim=True) + log_min_p)


def keep_top_k(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """See `SamplingOperations.keep_top_k`; `top_k` [num_rows, 1] is on the device, and at most `most`."""
    likeliest = logits.topk(most, dim=-1).values
    return _drop_below(logits, logits, likeliest.gather(1, top_k - 1))


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """See `SamplingOperations.keep_top_p`; `top_p` [num_rows, 1] is on the device."""
    probs = logits.softmax(-1)
    look = probs.shape[1] if logits.is_cuda else _FIRST_LOOK  # the host would have to wait for what the first look saw
    return _drop_below(logits, probs, _least_kept(probs, top_p, look))


def _least_kept(probs: Tensor, top_p: Tensor, look: int) -> Tensor:
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


def _drop_below(logits: Tensor, values: Tensor, least: Tensor) -> Tensor:
    """Sets `logits` to -inf, in place, where `values` (like logits) is below its row's `least` [num_rows, 1].

    Uses arithmetic instead of a mask: 1/1 - 1 is 0 and 1/0 - 1 is infinity. On a CPU this is five times as fast as
    `masked_fill_`, whose loop over a bool mask is not vectorised, and a NaN stays a NaN.
    """
    kept = torch.ge(values, least, out=torch.empty_like(logits))
    return logits.sub_(kept.reciprocal_().sub_(1))
