"""The way of tokens to the experts of other engines, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.executor.parallel.lockstep import Lockstep


class ExpertExchange:
    """Rows of tokens between the engines that share experts. All ranks of a step call both methods for each layer.

    Ranks with the same tensor coordinate exchange, one message each way for every pair, of the tokens that there are.
    """

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._engines = lockstep.engines

    def gather(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of `Experts.partial` for the tokens of all engines, engine by engine."""
        given = (x, ids, weights)
        own = torch.cat([each.contiguous().view(torch.uint8) for each in given], dim=1)
        parts = self._swap([own] * self._engines.size, own.shape[1])
        sizes = [each.shape[1] * each.element_size() for each in given]
        columns = torch.cat(parts).split(sizes, dim=1)
        x, ids, weights = (part.contiguous().view(each.dtype) for part, each in zip(columns, given, strict=True))
        return x, ids, weights

    def sums(self, outputs: Tensor) -> Tensor:
        """What the ranks made of this engine's tokens, added up in the order of engines.

        Args:
            outputs: what this rank made of the tokens of all engines, engine by engine [all_tokens, hidden].
        """
        width = outputs.shape[1] * outputs.element_size()
        theirs = outputs.contiguous().view(torch.uint8).split(self._lockstep.num_tokens)
        first, *others = (part.view(outputs.dtype) for part in self._swap_back(theirs, width))
        total = first.float()
        for part in others:
            total += part
        return total.to(outputs.dtype)

    def _swap(self, sent: Sequence[Tensor], width: int) -> list[Tensor]:
        """What each engine sends of its own tokens."""
        return self._exchange(sent, [sent[0].new_empty(count, width) for count in self._lockstep.num_tokens])

    def _swap_back(self, sent: Sequence[Tensor], width: int) -> list[Tensor]:
        """What each engine sends of this engine's tokens."""
        count = self._lockstep.num_tokens[self._engines.rank]
        return self._exchange(sent, [sent[0].new_empty(count, width) for _ in sent])

    def _exchange(self, sent: Sequence[Tensor], received: list[Tensor]) -> list[Tensor]:
        """Sends rows to each engine, and fills `received` with those from each; its own it keeps."""
        rank = self._engines.rank
        others = [engine for engine in range(self._engines.size) if engine != rank]
        self._engines.exchange(
            [(engine, sent[engine]) for engine in others if len(sent[engine])],
            [(engine, received[engine]) for engine in others if len(received[engine])],
        )
        received[rank] = sent[rank]
        return received
