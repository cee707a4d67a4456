"""The plans of an engine that runs its steps together with others. This file must not import torch."""

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
        """Returns when there may be a new message since the last `poll`, or after `wake`."""
        ...

    def wake(self) -> None:
        """Ends a `sleep`, or the next one; from any thread."""
        ...


class LockstepPlans:
    """An engine's own plans, each returned when its step has started everywhere.

    In steps without a plan of this engine, the worker computes its experts for the others. A plan without rows is not a
    step.

    Args:
        run_dummy_step: runs this worker's share of a step of other engines.
    """

    def __init__(self, own: WakeablePlans, peers: StepPeers, run_dummy_step: Callable[[], None]) -> None:
        self._own = own
        self._peers = peers
        self._run_dummy_step = run_dummy_step
        self._held: StepPlan | None = None  # received, but its step has not started
        self._has_begun = False  # the step of the next plan has started
        peers.listen(own.wake)

    def wait(self) -> StepPlan | WorkerCall:
        while (message := self.poll()) is None:
            self._own.sleep()
        return message

    def poll(self) -> StepPlan | WorkerCall | None:
        """Returns the next message, if there is one. Runs at most one step of other engines."""
        message = self._held or self._own.poll()
        self._held = None
        if isinstance(message, WorkerCall) or (message is not None and not message.slots):
            return message
        if not self._has_begun:
            if message is None and not self._peers.is_called:
                return None
            self._has_begun = self._peers.begin(0 if message is None else sum(message.num_scheduled))
            if not self._has_begun:
                self._held = message
                self._run_dummy_step()
                return None
        if message is not None:
            self._has_begun = False
        return message
