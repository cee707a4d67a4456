"""Ranks that are threads of one process. What one sends another arrives as late as it may."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from quire.executor.parallel.groups import Messages, ParallelGroup
from tests.executor.pretend_device import enter_pretended_device

Result = TypeVar("Result")

_PATIENCE_S = 60


class Letter:
    """A tensor that one rank sends another: the sender's own until one of the two has waited."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._lock = threading.Lock()

    def seal(self) -> None:
        """For the sender, whose tensor may change afterwards."""
        with self._lock:
            if self._tensor is not None:
                self._tensor = self._tensor.clone()

    def read_into(self, received: Tensor) -> None:
        """For the receiver, once."""
        with self._lock:
            assert self._tensor is not None, "a letter is read once"
            received.copy_(self._tensor)
            self._tensor = None


class Way(NamedTuple):
    """From rank to rank."""

    sender: int
    receiver: int


class Rendezvous:
    """What the threads of one group share."""

    def __init__(self, size: int) -> None:
        self._brought: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)
        self._letters: dict[tuple[Way, int], Letter] = {}
        self._posted = threading.Condition()

    def share(self, rank: int, x: Any) -> list[Any]:
        """What each rank brings, in the order of ranks. Returns when all have come."""
        self._brought[rank] = x
        self._barrier.wait(_PATIENCE_S)
        everyone = list(self._brought)
        self._barrier.wait(_PATIENCE_S)
        return everyone

    def post(self, way: Way, number: int, letter: Letter) -> None:
        """Hands over the letter with this number among those that go this way."""
        with self._posted:
            self._letters[way, number] = letter
            self._posted.notify_all()

    def take(self, way: Way, number: int) -> Letter:
        """Waits for a letter."""
        with self._posted:
            if not self._posted.wait_for(lambda: self._barrier.broken or (way, number) in self._letters, _PATIENCE_S):
                raise TimeoutError(f"rank {way.sender} sent rank {way.receiver} no message {number}")
            if self._barrier.broken:
                raise threading.BrokenBarrierError
            return self._letters.pop((way, number))

    def abort(self) -> None:
        """Ends the waiting of all ranks, of which one has failed."""
        self._barrier.abort()
        with self._posted:
            self._posted.notify_all()


class LateMessages(Messages):
    """Fills what is received in `wait`, and not before. Until then all of its bits are ones: floats are no numbers."""

    def __init__(self, sent: Sequence[Letter], received: Sequence[tuple[Tensor, Callable[[], Letter]]]) -> None:
        """`received` are tensors, and what waits for the letter of each."""
        super().__init__()
        self._sent = sent
        self._received = received
        for tensor, _ in received:
            tensor.view(-1).view(torch.uint8).fill_(0xFF)

    def wait(self) -> None:
        for letter in self._sent:
            letter.seal()
        for tensor, take in self._received:
            take().read_into(tensor)
        self._sent = self._received = ()


class ThreadGroup(ParallelGroup):
    """One rank, which is a thread of this process."""

    def __init__(self, rank: int, size: int, meeting: Rendezvous) -> None:
        super().__init__(rank, size)
        self.meeting = meeting
        self._num_messages: dict[Way, int] = {}

    @classmethod
    def all_of(cls, size: int) -> list[Self]:
        """The ranks of a group."""
        meeting = Rendezvous(size)
        return [cls(rank, size, meeting) for rank in range(size)]

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._parts(x)).sum(dim=0)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._parts(x), dim=dim)

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([parts[self.rank] for parts in self._parts(x)])

    def begin_exchange(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> Messages:
        letters = []
        for receiver, tensor in sent:
            way = Way(self.rank, receiver)
            letters.append(Letter(tensor))
            self.meeting.post(way, self._next(way), letters[-1])
        takes = []
        for sender, tensor in received:
            way = Way(sender, self.rank)
            takes.append((tensor, lambda way=way, number=self._next(way): self.meeting.take(way, number)))
        return LateMessages(letters, takes)

    def _next(self, way: Way) -> int:
        self._num_messages[way] = self._num_messages.get(way, 0) + 1
        return self._num_messages[way]

    def _parts(self, x: Tensor) -> list[Tensor]:
        """A rank may write into its own `x` while others still read: they read a copy."""
        return self.meeting.share(self.rank, x.clone())


def on_every_rank(size: int, job: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Results of `job(group)` for each rank, run side by side."""
    failures: list[BaseException] = []

    def run(group: ThreadGroup) -> Any:
        try:
            return job(group)
        except BaseException as failure:
            failures.append(failure)
            group.meeting.abort()  # the others would wait for ever
            return None

    with ThreadPoolExecutor(size, initializer=enter_pretended_device) as pool:
        results = list(pool.map(run, ThreadGroup.all_of(size)))
    if failures:
        raise failures[0]
    return results
