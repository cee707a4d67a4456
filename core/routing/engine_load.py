"""An engine's load, from its reports and from the requests sent to it since."""

from quire.core.wire.protocol import SchedulerStats

SEQUENCE_TOKENS = 128
"""Estimate of the tokens that a sequence will still generate; most answers have a few hundred."""


class EngineLoad:
    """The load of one engine, in tokens.

    load = pending + SEQUENCE_TOKENS * sequences

    `pending` counts prompt tokens that the engine has yet to compute, and `sequences` its unfinished sequences. Both
    add what this frontend has sent since the engine's last report, which covers all frontends. A report may be older
    than the last requests, so the count of sequences is at least this frontend's own.
    """

    def __init__(self) -> None:
        self._own = 0
        self._reported = 0
        self._sent = 0
        self._pending = 0

    @property
    def value(self) -> int:
        """The load, in tokens."""
        return self._pending + SEQUENCE_TOKENS * self.num_sequences

    @property
    def num_sequences(self) -> int:
        """Unfinished sequences of all frontends."""
        return max(self._own, self._reported + self._sent)

    @property
    def num_own(self) -> int:
        """Unfinished sequences of this frontend."""
        return self._own

    def add(self, num_sequences: int) -> None:
        """Counts sequences as the engine's own, before they are sent."""
        self._own += num_sequences

    def send(self, num_sequences: int, num_new_tokens: int) -> None:
        """Counts sequences that are sent to the engine, with the tokens that it has to compute first."""
        self._sent += num_sequences
        self._pending += num_new_tokens

    def remove(self, num_sequences: int) -> None:
        """Removes sequences that have ended, or moved to another engine."""
        self._own -= num_sequences

    def report(self, stats: SchedulerStats) -> None:
        """Takes the engine's statistics."""
        self._reported = stats.num_running + stats.num_waiting
        self._sent = 0
        self._pending = stats.num_pending_tokens

    def forget(self) -> None:
        """Forgets the reports of an engine that has ended."""
        self._reported = self._sent = self._pending = 0
