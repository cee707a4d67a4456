"""Messages between the pipeline stages of one tensor coordinate.

gloo sends nothing before the receiver has announced its receive. A receive posted only when a plan needs it would cost
each step a round trip. So receives are posted before there is a plan.
"""

from collections import deque
from types import ModuleType
from typing import Any, Protocol

import torch

from quire.executor.parallel.posted_receives import MAX_BYTES
from quire.executor.parallel.unprofiled_messages import start_unprofiled

_LARGE_TAG, _SMALL_TAG = 0, 1  # both ends know a message's size, which determines its tag


class StageNeighbours(Protocol):
    """The same tensor coordinate on the pipeline stages before and after a rank. Messages arrive in order."""

    def receive(self, message: torch.Tensor) -> torch.Tensor:
        """Fills `message` with the previous stage's message, of the same shape and dtype, and returns it."""
        ...

    def send(self, message: torch.Tensor) -> None:
        """Sends to the next stage, which need not be ready for it. Do not change `message` afterwards."""
        ...


class DistributedNeighbours:
    """Messages over torch.distributed, whose default group has all stages.

    Args:
        before: the previous stage's rank in the default group; None in the first stage.
        after: that of the next stage; None in the last stage.
        depth: the most messages that may be pending when another one is sent.
    """

    def __init__(self, distributed: ModuleType, before: int | None, after: int | None, depth: int) -> None:
        self._distributed = distributed
        self._before = before
        self._after = after
        self._depth = depth
        self._sent: deque[tuple[Any, torch.Tensor]] = (
            deque()
        )  # the transport reads the memory until the message is received

    def receive(self, message: torch.Tensor) -> torch.Tensor:
        self._distributed.recv(message, src=self._before, tag=_LARGE_TAG)
        return message

    def send(self, message: torch.Tensor) -> None:
        self._send(message, _LARGE_TAG)

    def _send(self, message: torch.Tensor, tag: int) -> None:
        while len(self._sent) >= self._depth:
            self._sent.popleft()[0].wait()
        self._sent.append((start_unprofiled(self._distributed.isend, message, dst=self._after, tag=tag), message))


class GlooNeighbours(DistributedNeighbours):
    """Messages over gloo, with receives of small messages that are posted before they are needed.

    There is a posted receive for each plan that may be under way: the engine submits no further plan before the last
    stage has received an earlier one's message and posted the next receive.
    """

    def __init__(self, distributed: ModuleType, before: int | None, after: int | None, depth: int) -> None:
        super().__init__(distributed, before, after, depth)
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()
        if before is not None:
            for _ in range(depth):
                self._post(torch.empty(MAX_BYTES, dtype=torch.uint8))

    def receive(self, message: torch.Tensor) -> torch.Tensor:
        if message.nbytes > MAX_BYTES:
            return super().receive(message)
        work, buffer = self._posted.popleft()
        work.wait()
        message.view(-1).copy_(buffer[: message.nbytes].view(message.dtype))
        self._post(buffer)
        return message

    def send(self, message: torch.Tensor) -> None:
        self._send(message, _LARGE_TAG if message.nbytes > MAX_BYTES else _SMALL_TAG)

    def _post(self, buffer: torch.Tensor) -> None:
        work = start_unprofiled(self._distributed.irecv, buffer, src=self._before, tag=_SMALL_TAG)
        self._posted.append((work, buffer))
