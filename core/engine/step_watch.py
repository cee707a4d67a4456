"""Watches the steps in flight, and reports the one that hangs."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import mul

from quire.core.engine.step_times import StepSize, StepTimes
from quire.core.errors import EngineError, EngineKilledError
from quire.core.process_activity import ActivityMeter
from quire.core.wire.protocol import StepPlan

TICK_SECONDS = 0.2
_SUSPICIOUS_SECONDS = 0.4
IDLE_SECONDS = 5.0
"""How long a worker may be stopped while no step is in flight."""
SHARED_IDLE_SECONDS = 0.4
"""The same, for engines that share experts."""


class StepWatch:
    """Measures steps, and judges the oldest in flight every `TICK_SECONDS`.

    Time in which a worker waited for a core does not count, nor does time in which this process itself stood still.

    Args:
        times: limits of steps.
        pids: the workers' processes on this host.
        stopped: the workers that a signal has stopped, by name.
        idle_seconds: how long they may be, while no step is in flight.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        times: StepTimes,
        pids: Callable[[], Sequence[int]],
        stopped: Callable[[], Sequence[str]],
        *,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._times = times
        self._pids = pids
        self._stopped = stopped
        self._idle_seconds = idle_seconds
        self._stopped_seconds = 0.0  # while no step was in flight
        self._clock = clock
        self._steps: deque[tuple[int, StepSize, float]] = deque()  # (id, size, time of submission)
        self._done_at = 0.0
        self._looked_at = clock()
        self._watched: int | None = None  # the step that was the oldest at the last look
        self._waited_seconds = 0.0
        self._meters: list[ActivityMeter] = []
        self.is_hung = False

    def add(self, plan: StepPlan) -> None:
        """Notes that a step was submitted."""
        num_pairs = sum(map(mul, plan.num_scheduled, plan.num_computed))
        self._steps.append((plan.step_id, StepSize.of(sum(plan.num_scheduled), num_pairs), self._clock()))

    def complete(self) -> None:
        """Notes that the oldest step is done."""
        _, size, submitted_at = self._steps.popleft()
        now = self._clock()
        self._times.add(size, now - max(submitted_at, self._done_at))
        self._done_at = now

    def look(self) -> None:
        """Judges the oldest step in flight.

        Raises:
            EngineKilledError: a worker was stopped by somebody outside.
            EngineError: the step takes far longer than others of its size.
        """
        now = self._clock()
        tick = min(now - self._looked_at, 2 * TICK_SECONDS)
        self._looked_at = now
        if not self._steps:
            self._look_at_idle(tick)
        if not self._steps or self._steps[0][0] != self._watched:
            self._watched = self._steps[0][0] if self._steps else None
            self._waited_seconds = 0.0
            self._meters.clear()
            return
        self._waited_seconds += max(0.0, tick - self._starved_seconds())
        if self._waited_seconds < _SUSPICIOUS_SECONDS:
            return
        step_id, size, _ = self._steps[0]
        if stopped := self._stopped():
            self.is_hung = True
            raise _killed(stopped)
        limit = self._times.limit(size)
        if self._waited_seconds > limit:
            self.is_hung = True
            raise EngineError(
                f"Step {step_id} made no progress for {self._waited_seconds:.1f} s (limit of such steps: {limit:.1f} "
                "s); QUIRE_ENGINE_ITERATION_TIMEOUT_S raises the limit."
            )

    def _look_at_idle(self, tick: float) -> None:
        """Judges the workers while they wait for steps. Those of other engines may wait for them."""
        stopped = self._stopped()
        self._stopped_seconds = self._stopped_seconds + tick if stopped else 0.0
        if self._stopped_seconds > self._idle_seconds:
            self.is_hung = True
            raise _killed(stopped)

    def _starved_seconds(self) -> float:
        """The longest time since the last look that a worker's thread waited for a core."""
        if not self._meters:
            self._meters = [ActivityMeter(pid) for pid in self._pids()]
            return 0.0
        return max((meter.look().starved_seconds for meter in self._meters), default=0.0)


def _killed(stopped: Sequence[str]) -> EngineKilledError:
    return EngineKilledError(f"Stopped by a signal (SIGSTOP): {', '.join(stopped)}.")
