"""The scheduler's requests from their arrival to their end, and the slots of those that run."""

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from quire.core.kv.kv_cache import KVCacheManager
from quire.core.scheduling.loading import LoadingRequests
from quire.core.scheduling.queue import RequestQueue
from quire.core.scheduling.request import Request, RequestStatus
from quire.core.scheduling.shares import Shares

priority_key = attrgetter("priority_key")


class HeldRequests:
    """All unfinished requests. Each of them waits, loads pages or runs.

    Args:
        num_slots: the most requests that run.
        kv: has the pages of those that run.

    Attributes:
        by_id: all of them.
        running: in priority order; the last is preempted first.
        waiting: those with neither slot nor pages.
        loading: those that wait for pages which moves bring.
        shares: what tenants have of the slots.
        free_slots: the last is taken first.
        num_watching: those that may end by repeating themselves.
    """

    def __init__(self, num_slots: int, kv: KVCacheManager) -> None:
        self._num_slots = num_slots
        self._kv = kv
        self.by_id: dict[str, Request] = {}
        self.running: list[Request] = []
        self.shares = Shares()
        self.waiting = RequestQueue(self.shares)
        self.loading = LoadingRequests()
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.num_watching = 0
        self._released: list[int] = []  # slots that the workers clear with the next plan

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.by_id.values())

    @property
    def num_waiting(self) -> int:
        """Those that wait or load."""
        return len(self.waiting) + len(self.loading)

    @property
    def num_new_tokens(self) -> int:
        """The sum of `num_new_tokens` of those that wait or load."""
        return self.waiting.num_new_tokens + self.loading.num_new_tokens

    def add(self, request: Request) -> None:
        """Queues a new request."""
        self.by_id[request.request_id] = request
        self.num_watching += request.watches_repetition
        self.waiting.push(request)

    def run(self, request: Request) -> None:
        """Gives a slot to a request, which has left the queue and has its pages."""
        request.slot = self.free_slots.pop()
        request.status = RequestStatus.RUNNING
        self.shares.on_running(request)
        insort(self.running, request, key=priority_key)

    def preempt(self, victim: Request) -> None:
        """Takes pages and slot from a running request that is not in the plan, and queues it again."""
        self.running.remove(victim)
        self._leave_slot(victim)
        victim.forget_drafts()
        self._kv.free(victim)
        victim.status = RequestStatus.WAITING
        victim.num_preemptions += 1
        self.waiting.push(victim)

    def end(self, request: Request) -> None:
        """Frees all resources of a request. `drop_finished` removes it from `running` later, once for all of a
        step."""
        del self.by_id[request.request_id]
        self.num_watching -= request.watches_repetition
        self.shares.on_ended(request)
        if request.status is RequestStatus.WAITING:
            self.waiting.forget(request)
        elif request.status is RequestStatus.LOADING:
            self.loading.forget(request)
            request.status = RequestStatus.FINISHED
        else:
            self._leave_slot(request)
            self._kv.free(request)
            request.status = RequestStatus.FINISHED

    def drop_finished(self) -> None:
        """Removes those from `running` that have ended."""
        if len(self.running) + len(self.free_slots) != self._num_slots:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def take_released(self) -> list[int]:
        """The slots that were left since the last call."""
        released, self._released = self._released, []
        return released

    def check_invariants(self) -> None:
        """Asserts that every request and slot is counted exactly once."""
        slots = [request.slot for request in self.running]
        assert sorted(self.free_slots + slots) == list(range(self._num_slots)), "a slot is lost or shared"
        assert len(slots) + self.num_waiting == len(self.by_id), "a request neither runs nor waits"
        waiting = [request for request in self if request.status is RequestStatus.WAITING]
        assert self.waiting.num_new_tokens == sum(request.num_new_tokens for request in waiting), "tokens miscounted"
        for request in self:
            if request.status in (RequestStatus.WAITING, RequestStatus.LOADING):
                assert not request.block_tables, f"{request.request_id} waits but holds pages"

    def _leave_slot(self, request: Request) -> None:
        self.shares.on_left(request)
        self.free_slots.append(request.slot)
        self._released.append(request.slot)
        request.slot = -1
