"""The plans of an engine that takes its steps together with others. This file must not import torch."""

from collections.abc import Callable
from typing import Protocol

from quire.core.wire.protocol import StepPlan, WorkerCall


class StepPeers(Protocol):
    """The ranks of all engines; see `quire.executor.parallel.lockstep.Lockstep`."""

    def listen(self, wake: Callable[[], None]) -> None: ...

    @property
    def is_called(self) -> bool: ...

    def begin(self, num_tokens: int) -> bool: ...


class WakeablePlans(Protocol):
    """The plans and calls of one engine, in order. Methods raise the exception that ends the worker."""

    def poll(self) -> StepPlan | WorkerCall | None: ...

    def sleep(self) -> None:
        """Returns when there may be another one since the last `poll`, or after `wake`."""
        ...

    def wake(self) -> None:
        """Ends a `sleep`, or the next one; from any thread."""
        ...


class LockstepPlans:
    """See `quire.executor.processes.step_loop.Plans`: an engine's own plans, each when its step has begun everywhere.

    In steps without a plan of the engine, the worker accompanies the others.

    Args:
        accompany: does this worker's share of a step that other engines take.
    """

    def __init__(self, own: WakeablePlans, peers: StepPeers, accompany: Callable[[], None]) -> None:
        self._own = own
        self._peers = peers
        self._accompany = accompany
        self._held: StepPlan | None = None  # its step has not begun
        self._has_begun = False  # the step of the next plan
        peers.listen(own.wake)

    def wait(self) -> StepPlan | WorkerCall:
        while (message := self.poll()) is None:
            self._own.sleep()
        return message

    def poll(self) -> StepPlan | WorkerCall | None:
        """See `Plans.poll`. Takes at most one step of others."""
        message = self._held or self._own.poll()
        self._held = None
        if isinstance(message, WorkerCall):
            return message
        if not self._has_begun:
            if message is None and not self._peers.is_called:
                return None
            self._has_begun = self._peers.begin(0 if message is None else sum(message.num_scheduled))
            if not self._has_begun:
                self._held = message
                self._accompany()
                return None
        if message is not None:
            self._has_begun = False
        return message
