"""Exchanges small tensors between the ranks of a gloo group, by receives that are posted before they are needed.

gloo sends nothing before the receiver has announced its receive. So a message takes a round trip if its receive is
posted when it is needed, and half of that if the receive was posted before. gloo's collectives take one or more.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from quire.executor.parallel.unprofiled_messages import start_unprofiled

MAX_BYTES = 256 * 1024
"""The largest tensor. With more, the bytes take longer than the round trips, and buffers would have to be larger."""
MAX_TOGETHER = 2
"""The most messages of one exchange."""
_DEPTH = 1 + MAX_TOGETHER  # a peer may be one exchange ahead, and needs the next buffer already
_TAG = 1  # other messages between two ranks have tag 0


class PostedReceives:
    """Exchanges tensors of at most `MAX_BYTES` between the ranks of a group. Two ranks exchange in the same order.

    Args:
        distributed: the module torch.distributed.
        handle: a group over gloo.
    """

    def __init__(self, distributed: ModuleType, handle: Any, rank: int, size: int) -> None:
        self._distributed = distributed
        self._handle = handle
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._posted: dict[int, deque[tuple[Any, torch.Tensor]]] = {peer: deque() for peer in self._peers}
        self._used = [(peer, torch.empty(MAX_BYTES, dtype=torch.uint8)) for _ in range(_DEPTH) for peer in self._peers]

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks by rank, with the shape and dtype of `x`, which is contiguous.

        They may be read until the next exchange.
        """
        [came] = self.exchange_parts([[x] * (1 + len(self._peers))])
        return came

    def exchange_parts(self, messages: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Exchanges at most `MAX_TOGETHER` messages at once. Each has a tensor for each rank, all of one shape and
        dtype, which are the same on other ranks.
        """
        sent = [(peer, parts[peer]) for parts in messages for peer in self._peers]
        came = iter(self.swap(sent, [peer for peer, _ in sent]))
        received = []
        for parts in messages:
            own = parts[self._rank]
            others = {peer: next(came)[: own.nbytes].view(own.dtype).view(own.shape) for peer in self._peers}
            received.append([others.get(rank, own) for rank in range(len(parts))])
        return received

    def swap(self, sent: Iterable[tuple[int, torch.Tensor]], senders: Iterable[int]) -> list[torch.Tensor]:
        """Sends dense tensors to ranks. Returns [MAX_BYTES] uint8 for each of the `senders`: its next tensor's bytes,
        then undefined ones.

        A rank is in both at most `MAX_TOGETHER` times. The results may be read until the next exchange.
        """
        for peer, buffer in self._used:
            self._posted[peer].append((self._receive(buffer, peer), buffer))
        send, group = self._distributed.isend, self._handle
        works = [send(x, group=group, group_dst=peer, tag=_TAG) for peer, x in sent]
        self._used = [(peer, self._arrived(peer)) for peer in senders]
        for work in works:
            work.wait()
        return [buffer for _, buffer in self._used]

    def _arrived(self, peer: int) -> torch.Tensor:
        work, buffer = self._posted[peer].popleft()
        work.wait()
        return buffer

    def _receive(self, buffer: torch.Tensor, peer: int) -> Any:
        return start_unprofiled(self._distributed.irecv, buffer, group=self._handle, group_src=peer, tag=_TAG)
