"""The scheduler's requests from their arrival to their end, and the slots of those that run."""

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from quire.core.kv.kv_cache import KVCacheManager
from quire.core.scheduling.adapter_slots import AdapterSlots
from quire.core.scheduling.loading import Awaited, LoadingRequests
from quire.core.scheduling.queue import RequestQueue
from quire.core.scheduling.request import Request, RequestStatus
from quire.core.scheduling.shares import Shares

priority_key = attrgetter("priority_key")


class HeldRequests:
    """All unfinished requests. Each of them waits, loads pages or its adapter, or runs.

    Args:
        num_slots: the most requests that run.
        kv: has the pages of those that run.
        adapters: the slots of their adapters; None: they have none.

    Attributes:
        by_id: all of them.
        running: in priority order; the last is preempted first.
        waiting: those with neither slot nor pages.
        loading: those that wait for pages which moves bring, or for their adapters.
        shares: what tenants have of the slots.
        free_slots: the last is taken first.
        num_watching: those that may end by repeating themselves.
    """

    def __init__(self, num_slots: int, kv: KVCacheManager, adapters: AdapterSlots | None = None) -> None:
        self._num_slots = num_slots
        self._kv = kv
        self.adapters = adapters
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

    @property
    def num_waiting_bytes(self) -> int:
        """The memory that those take which wait or load."""
        return self.waiting.held.total + self.loading.held.total

    def add(self, request: Request) -> None:
        """Queues a new request."""
        self.by_id[request.request_id] = request
        self.num_watching += request.watches_repetition
        if self.adapters is not None and request.adapter is not None:
            self.adapters.add(request.adapter)
        self.waiting.push(request)

    def run(self, request: Request) -> None:
        """Gives a slot to a request, which has left the queue and has its pages."""
        request.slot = self.free_slots.pop()
        request.status = RequestStatus.RUNNING
        if self.adapters is not None and request.adapter is not None:
            request.adapter_slot = self.adapters.take(request.adapter)
        self.shares.on_running(request)
        insort(self.running, request, key=priority_key)

    def waits_for_adapter(self, request: Request) -> bool:
        """Takes the next waiting request out of the queue if its adapter is not in a slot yet."""
        if self.adapters is None or request.adapter is None:
            return False
        wait = self.adapters.wait_for(request.adapter)
        if wait is None:
            return False
        if wait is self.adapters.for_slot:
            self.adapters.queue(request.adapter)
        self.loading.add(self.waiting.pop(), wait)
        return True

    def queue_again(self, awaited: Awaited) -> list[Request]:
        """Puts the requests back into the queue that waited for this, and returns them."""
        requests = self.loading.take(awaited)
        for request in requests:
            self._stop_waiting(request, awaited)
            self.waiting.push(request)
        return requests

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
        if self.adapters is not None and request.adapter is not None:
            self.adapters.remove(request.adapter)
        self.shares.on_ended(request)
        if request.status is RequestStatus.WAITING:
            self.waiting.forget(request)
        elif request.status is RequestStatus.LOADING:
            self._stop_waiting(request, self.loading.forget(request))
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
        if self.adapters is not None:
            self.adapters.check_invariants(Counter(r.adapter_slot for r in self.running if r.adapter_slot >= 0))
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
        if self.adapters is not None and request.adapter is not None:
            has_room = self.adapters.give_back(request.adapter, request.adapter_slot)
            request.adapter_slot = -1
            if has_room:
                self.queue_again(self.adapters.for_slot)

    def _stop_waiting(self, request: Request, awaited: Awaited) -> None:
        if self.adapters is not None and awaited is self.adapters.for_slot and request.adapter is not None:
            self.adapters.unqueue(request.adapter)
