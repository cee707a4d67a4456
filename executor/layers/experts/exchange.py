"""Sends tokens to the experts of other engines, and their outputs back."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.wire.expert_rows import chosen_share, saved_bytes
from quire.executor.layers.experts.places import ExpertPlaces
from quire.executor.parallel.lockstep import Lockstep


class Dispatched(NamedTuple):
    """Tokens that a rank's experts received, engine by engine, and the bookkeeping for the way back.

    Attributes:
        x, ids, weights: arguments of `Backend.experts`, with experts' indices in the whole layer.
        num_own: tokens of this engine.
        rows: the indices of those that were sent, [num_sent] int64, engine by engine.
        sent: how many went to each engine.
        received: how many came from each.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    num_own: int
    rows: Tensor
    sent: list[int]
    received: list[int]


class ExpertExchange:
    """Exchanges rows of tokens between the engines that share experts. All ranks of a step call both methods for each
    layer.

    Ranks with the same tensor coordinate exchange. A token goes to the engines with its experts, and a sum comes back
    from each. If the message with the number of tokens would take longer than this saves, a token goes to all engines.
    """

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._engines = lockstep.engines

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, places: ExpertPlaces) -> Dispatched:
        """Sends this engine's tokens, and receives those of all for this rank's experts; `places` are the layer's."""
        given = (x, ids, weights)
        own = torch.cat([each.contiguous().view(torch.uint8) for each in given], dim=1)
        engines, limits = self._engines, self._lockstep.num_tokens
        if self._is_worth_choosing(own.shape[1] + x.shape[1] * x.element_size(), places.num_experts, ids.shape[1]):
            chosen = torch.zeros(engines.size + 1, len(x), dtype=torch.bool, device=x.device)
            chosen.scatter_(0, places.engines(x, ids).T, True)
            chosen = chosen[: engines.size]
            rows, sent = chosen.nonzero()[:, 1], chosen.sum(dim=1).tolist()
            came, received = engines.all_to_all_rows(own[rows], sent, limits)
        else:
            rows, sent = torch.arange(len(x), device=x.device).repeat(engines.size), [len(x)] * engines.size
            received = limits
            came = engines.exchange_rows(own[rows], sent, received)
        columns = came.split([each.shape[1] * each.element_size() for each in given], dim=1)
        # Not `contiguous`: it does not copy a single row, which may lie at an address unaligned for the dtype.
        dense = (part.clone(memory_format=torch.contiguous_format) for part in columns)
        x, ids, weights = (part.view(each.dtype) for part, each in zip(dense, given, strict=True))
        return Dispatched(x, ids, weights, len(own), rows, sent, received)

    def combine(self, outputs: Tensor, tokens: Dispatched) -> Tensor:
        """Returns the sums for this engine's tokens [num_own, hidden], added up in the order of engines.

        Args:
            outputs: this rank's outputs for the tokens that it received [num_received, hidden].
        """
        back = self._engines.exchange_rows(outputs.contiguous().view(torch.uint8), tokens.received, tokens.sent)
        total = outputs.new_zeros(tokens.num_own, outputs.shape[1], dtype=torch.float32)
        parts = back.view(outputs.dtype).split(tokens.sent)
        for rows, part in zip(tokens.rows.split(tokens.sent), parts, strict=True):
            total.index_add_(0, rows, part.float())
        return total.to(outputs.dtype)

    def _is_worth_choosing(self, row_bytes: int, num_experts: int, per_token: int) -> bool:
        """Returns True if each token goes only to its experts' engines in this step. All ranks agree on it."""
        share = chosen_share(num_experts, self._lockstep.size, per_token)
        most = max(self._lockstep.num_tokens)
        return saved_bytes(most, self._engines.size, row_bytes, share) > self._engines.counts_cost
