"""How busy an engine is, from what it reports and from what it was sent since."""

from quire.core.wire.protocol import SchedulerStats

WAITING_WEIGHT = 4
"""Running sequences that a waiting one counts as: a queue means that an engine has no room left."""


class EngineLoad:
    """The load of one engine, in sequences.

    load = max(own, running + 4 * waiting + sent)

    `running` and `waiting` are the engine's last report, about all its frontends. `sent` are the sequences of this
    frontend since that report. A report may be older than what was sent before it, so `own`, the unfinished sequences
    of this frontend, are the least.
    """

    def __init__(self) -> None:
        self._own = 0
        self._reported = 0
        self._sent = 0

    @property
    def value(self) -> int:
        """The load."""
        return max(self._own, self._reported + self._sent)

    @property
    def num_own(self) -> int:
        """Unfinished sequences of this frontend."""
        return self._own

    def add(self, num_sequences: int) -> None:
        """Sequences were sent to the engine."""
        self._own += num_sequences
        self._sent += num_sequences

    def remove(self, num_sequences: int) -> None:
        """Sequences have ended, or went to another engine."""
        self._own -= num_sequences

    def report(self, stats: SchedulerStats) -> None:
        """The engine has reported."""
        self._reported = stats.num_running + WAITING_WEIGHT * stats.num_waiting
        self._sent = 0

    def forget(self) -> None:
        """The engine has ended, and its reports with it."""
        self._reported = self._sent = 0
