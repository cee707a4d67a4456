"""The adapters of the workers: which are in a slot, which are in the host's memory, and which are loaded next.

A slot is the workers' memory for one adapter. It is given to another adapter only when no running request uses it. A
load reads an adapter into the host's memory and copies it to a slot, beside the steps. Both memories drop the adapter
that was used longest ago.
"""

from collections import Counter, OrderedDict

from quire.core.wire.adapters import Adapter, AdapterLoad


class AdapterWait:
    """Requests wait for this: the end of a load, or a slot that no running request uses."""

    def __init__(self, load: AdapterLoad | None = None) -> None:
        self.load = load


class AdapterSlots:
    """Decides which adapter takes which slot.

    Args:
        num_slots: adapters that a step can have.
        num_on_host: adapters in the host's memory, at least as many.
        max_overtaking: requests whose adapters are in slots may go before an earlier one that waits for a slot, so many
            at most until that one has its slot.

    Attributes:
        for_slot: what requests wait for when running requests use all slots.
    """

    def __init__(self, num_slots: int, num_on_host: int, *, max_overtaking: int = 256) -> None:
        self.for_slot = AdapterWait()
        self._num_on_host = num_on_host
        self._max_overtaking = max_overtaking
        self._slots: list[Adapter | None] = [None] * num_slots  # what is there, or on its way there
        self._uses: Counter[int] = Counter()  # running requests, by slot
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))  # slots, by their last use
        self._on_host: OrderedDict[bytes, None] = OrderedDict()  # digests, by their last use
        self._useless: set[bytes] = set()  # digests that failed, of which workers may hold parts all the same
        self._loading: dict[bytes, AdapterWait] = {}  # by digest
        self._placing: set[int] = set()  # slots that loads write to
        self._new: list[AdapterWait] = []  # loads that nobody has started yet
        self._waiting: Counter[bytes] = Counter()  # requests that wait for a slot, by digest
        self._num_overtaking = 0
        self._unfinished: Counter[str] = Counter()  # requests, by the names of their adapters
        self._running: Counter[str] = Counter()  # of those

    # --------------------------------------------------------------------------------------------------- requests

    def add(self, adapter: Adapter) -> None:
        """Notes a request with `adapter`."""
        self._unfinished[adapter.name] += 1

    def remove(self, adapter: Adapter) -> None:
        """Notes the end of a request with `adapter`."""
        self._unfinished[adapter.name] -= 1
        if not self._unfinished[adapter.name]:
            del self._unfinished[adapter.name]

    @property
    def running_names(self) -> list[str]:
        """The names of the adapters of running requests."""
        return [name for name, count in self._running.items() if count]

    @property
    def waiting_names(self) -> list[str]:
        """The names of the adapters of waiting requests."""
        return [name for name, count in self._unfinished.items() if count > self._running[name]]

    def wait_for(self, adapter: Adapter) -> AdapterWait | None:
        """What the next request with `adapter` has to wait for; None if it can run now. Starts a load if need be."""
        digest = adapter.digest
        if digest in self._loading:
            return self._loading[digest]
        if self._slot_of(digest) is not None:
            return self.for_slot if self._is_overtaking_too_much else None
        slot = self._free_slot()
        if slot is None:
            return self.for_slot
        return self._load(adapter, slot)

    def take(self, adapter: Adapter) -> int:
        """Notes that a request with `adapter`, for which `wait_for` is None, runs. Returns the adapter's slot."""
        slot = self._slot_of(adapter.digest)
        assert slot is not None, "wait_for comes before take"
        self._uses[slot] += 1
        self._running[adapter.name] += 1
        self._order.move_to_end(slot)
        if adapter.digest in self._on_host:  # else the slot alone has it
            self._on_host.move_to_end(adapter.digest)
        self._num_overtaking += bool(self._waiting)
        return slot

    def give_back(self, adapter: Adapter, slot: int) -> bool:
        """Notes that a request with `adapter`, in `slot`, does not run any more. Returns True if no other uses it."""
        self._running[adapter.name] -= 1
        if not self._running[adapter.name]:
            del self._running[adapter.name]
        self._uses[slot] -= 1
        return not self._uses[slot]

    def queue(self, adapter: Adapter) -> None:
        """Notes that a request waits for a slot."""
        self._waiting[adapter.digest] += 1

    def unqueue(self, adapter: Adapter) -> None:
        """Notes that a request waits for a slot no more."""
        self._waiting[adapter.digest] -= 1
        if not self._waiting[adapter.digest]:
            del self._waiting[adapter.digest]
        if not self._waiting:
            self._num_overtaking = 0

    # ------------------------------------------------------------------------------------------------------- loads

    def prefetch(self, adapter: Adapter) -> AdapterWait:
        """Starts to read an adapter into the host's memory, or joins a load of it."""
        if adapter.digest in self._loading:
            return self._loading[adapter.digest]
        return self._load(adapter, -1)

    def take_new_loads(self) -> list[AdapterWait]:
        """The loads that were decided since the last call; the caller starts them, in order."""
        new, self._new = self._new, []
        return new

    def finish(self, wait: AdapterWait, *, is_there: bool) -> None:
        """Notes the end of a load. Without `is_there`, it has failed."""
        assert wait.load is not None
        digest, slot = wait.load.adapter.digest, wait.load.slot
        del self._loading[digest]
        self._placing.discard(slot)
        if not is_there:
            self._on_host.pop(digest, None)
            self._useless.add(digest)
            if slot >= 0:
                self._slots[slot] = None

    def _load(self, adapter: Adapter, slot: int) -> AdapterWait:
        dropped, self._useless = sorted(self._useless), set()
        if adapter.digest not in self._on_host:
            while len(self._on_host) >= self._num_on_host and (oldest := self._oldest_on_host()) is not None:
                del self._on_host[oldest]
                dropped.append(oldest)
            self._on_host[adapter.digest] = None
        self._on_host.move_to_end(adapter.digest)
        if slot >= 0:
            self._slots[slot] = adapter
            self._placing.add(slot)
            self._order.move_to_end(slot)
        wait = self._loading[adapter.digest] = AdapterWait(AdapterLoad(adapter, slot, dropped))
        self._new.append(wait)
        return wait

    def _oldest_on_host(self) -> bytes | None:
        """The adapter to drop from the host's memory: if possible, one that is in no slot."""
        idle = [digest for digest in self._on_host if digest not in self._loading]
        placed = {each.digest for each in self._slots if each is not None}
        return next((digest for digest in idle if digest not in placed), idle[0] if idle else None)

    def _slot_of(self, digest: bytes) -> int | None:
        return next((slot for slot, held in enumerate(self._slots) if held is not None and held.digest == digest), None)

    def _free_slot(self) -> int | None:
        """The slot that was used longest ago, of those that no running request and no load uses."""
        free = [slot for slot in self._order if not self._uses[slot] and slot not in self._placing]
        return next((slot for slot in free if self._slots[slot] is None), free[0] if free else None)

    @property
    def _is_overtaking_too_much(self) -> bool:
        return bool(self._waiting) and self._num_overtaking >= self._max_overtaking

    def check_invariants(self, in_use: Counter[int]) -> None:
        """Asserts that running requests use the slots as counted.

        Args:
            in_use: requests that run with an adapter, by slot.
        """
        assert +self._uses == in_use, "uses of adapters' slots are miscounted"
        assert len(self._on_host) <= self._num_on_host + len(self._loading), "too many adapters in the host's memory"
