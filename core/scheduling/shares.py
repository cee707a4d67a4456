"""Divides an engine between tenants, the API keys of a server: by weight, whatever each of them asks for.

A tenant is served the tokens that its requests compute and sample. The next request to be admitted is one of the tenant
that was served least for its weight. This is start-time fair queueing: a tenant that comes back starts
with the count of the one whose turn it is, so nobody saves up turns.

Slots are the second matter. A tenant without any gets one from the tenant with the most (`giver`). Running requests
take turns by tenant (`in_turns`): the first to lose its pages is one of the tenant with the most.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from quire.core.scheduling.request import Request


class Tenant:
    """One tenant's share.

    Attributes:
        weight: of its newest request.
        served: tokens divided by weight.
        num_running: its requests that have slots.
    """

    __slots__ = ("name", "num_running", "served", "weight")

    def __init__(self, name: str, served: float) -> None:
        self.name = name
        self.weight = 1.0
        self.served = served
        self.num_running = 0


class Shares:
    """What each tenant was served, and which slots it has."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._now = 0.0  # `served` of the tenant whose request was admitted last, at that time

    def on_waiting(self, request: Request, *, is_first: bool) -> None:
        """Notes a request that waits.

        Args:
            is_first: its tenant had none that did.
        """
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = Tenant(request.tenant, self._now)
        tenant.weight = request.weight
        if is_first:
            tenant.served = max(tenant.served, self._now)

    def on_running(self, request: Request) -> None:
        """Notes a request that gets a slot, and counts the tokens that it computes before it samples."""
        tenant = self._tenants[request.tenant]
        self._now = max(self._now, tenant.served)
        num_tokens = 0 if request.num_preemptions else request.num_new_tokens  # no tenant asks to be preempted
        tenant.served += (1 + num_tokens) / tenant.weight
        tenant.num_running += 1

    def on_left(self, request: Request) -> None:
        """Notes a request that has lost its slot."""
        self._tenants[request.tenant].num_running -= 1

    def on_ended(self, request: Request) -> None:
        """Counts the tokens that were sampled for a request."""
        tenant = self._tenants[request.tenant]
        tenant.served += len(request.output_token_ids) / tenant.weight

    def served(self, name: str) -> float:
        """What a tenant with a waiting request was served."""
        return self._tenants[name].served

    def is_divided(self, waiting: Collection[str]) -> bool:
        """True if more than one tenant has a request; `waiting` are those with one that waits."""
        running = (each.name for each in self._tenants.values() if each.num_running)
        return len({*waiting, *running}) > 1

    def giver(self, head: Request, running: Sequence[Request]) -> Request | None:
        """The running request that gives its slot to `head`, the next to be admitted; None if none has to.

        `head` gets one if its tenant has none. The last request of the tenant with the most for its weight gives it.
        """
        if self._tenants[head.tenant].num_running:
            return None
        several = [each for each in self._tenants.values() if each.num_running > 1]
        if not several:
            return None
        largest = max(several, key=lambda each: each.num_running / each.weight)
        return next(each for each in reversed(running) if each.tenant == largest.name)

    def in_turns(self, running: Sequence[Request]) -> list[Request]:
        """Puts requests, which are in the policy's order, into an order by tenants: each one's k-th comes before the
        others' k+1-th, for equal weights."""
        counts: Counter[str] = Counter()
        places = []
        for request in running:
            counts[request.tenant] += 1
            places.append(counts[request.tenant] / self._tenants[request.tenant].weight)
        return [running[index] for index in sorted(range(len(running)), key=places.__getitem__)]


def giving_sequence(head: Request, running: Sequence[Request], num_slots: int) -> Request | None:
    """The running sequence that gives its slot to `head`, the next to be admitted; None if none has to.

    Sequences of one request (`n`) that hold more than half of the slots leave one to a request that has none.
    """
    counts = Counter(id(request.prompt) for request in running)  # the sequences of a request share its prompt
    if not counts or id(head.prompt) in counts:
        return None
    [(prompt, count)] = counts.most_common(1)
    if count == 1 or 2 * count <= num_slots:
        return None
    return next(each for each in reversed(running) if id(each.prompt) == prompt)
