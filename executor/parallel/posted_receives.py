"""Small tensors from each rank of a gloo group to all others, with receives that are posted before they are needed.

gloo sends nothing before the receiver has said that it waits. So a message whose receive is posted when it is needed
takes a round trip, and one whose receive was posted before takes half of it. gloo's own collectives take one or more.
"""

from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from quire.executor.parallel.unrecorded import unrecorded

MAX_BYTES = 256 * 1024
"""Of a tensor. What is larger takes longer for its bytes than for round trips, and would need larger buffers."""
MAX_TOGETHER = 2
"""Messages of one exchange."""
_DEPTH = 1 + MAX_TOGETHER  # a peer may be one exchange ahead, and finds the next buffer waiting
_TAG = 1  # other messages between two ranks have 0


class PostedReceives:
    """Exchanges tensors of at most `MAX_BYTES` between all ranks of a group. All call it in the same order.

    Args:
        distributed: the module torch.distributed.
        handle: a group over gloo.
    """

    def __init__(self, distributed: ModuleType, handle: Any, rank: int, size: int) -> None:
        self._distributed = distributed
        self._handle = handle
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._posted: deque[dict[int, tuple[Any, torch.Tensor]]] = deque()  # by peer, in the order of exchanges
        self._used = [{peer: torch.empty(MAX_BYTES, dtype=torch.uint8) for peer in self._peers} for _ in range(_DEPTH)]

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks by rank, with the shape and dtype of `x`, which is contiguous.

        They may be read until the next exchange.
        """
        [came] = self.exchange_parts([[x] * (1 + len(self._peers))])
        return came

    def exchange_parts(self, messages: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """As `exchange`, of at most `MAX_TOGETHER` messages at once. Each has a tensor for each rank, of one shape and
        dtype, and the same as those of other ranks."""
        for buffers in self._used:
            self._posted.append({peer: (self._receive(buffer, peer), buffer) for peer, buffer in buffers.items()})
        sent = [
            self._distributed.isend(parts[peer], group=self._handle, group_dst=peer, tag=_TAG)
            for parts in messages
            for peer in self._peers
        ]
        self._used = [{} for _ in messages]
        received = [self._collect(parts[self._rank], used) for parts, used in zip(messages, self._used, strict=True)]
        for work in sent:
            work.wait()
        return received

    def _collect(self, own: torch.Tensor, used: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """What the next receives bring, and `own`, by rank. Notes the buffers in `used`."""
        came = {self._rank: own}
        for peer, (work, buffer) in self._posted.popleft().items():
            work.wait()
            came[peer] = buffer[: own.nbytes].view(own.dtype).view(own.shape)
            used[peer] = buffer
        return [came[rank] for rank in sorted(came)]

    def _receive(self, buffer: torch.Tensor, peer: int) -> Any:
        return unrecorded(self._distributed.irecv, buffer, group=self._handle, group_src=peer, tag=_TAG)
