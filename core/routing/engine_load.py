"""How much work an engine has in hand, from what it reports and from what it was sent since."""

from quire.core.wire.protocol import SchedulerStats

SEQUENCE_TOKENS = 128
"""Tokens that a sequence in hand will yet generate: nobody knows, and most answers have a few hundred."""


class EngineLoad:
    """The work in hand of one engine, in tokens.

    load = pending + SEQUENCE_TOKENS * sequences

    `pending` are tokens of prompts that the engine has yet to compute, and `sequences` are those that it has. Both are
    the engine's last report, about all its frontends, and what this frontend has sent since. A report may be older
    than what was sent before it, so the unfinished sequences of this frontend are the least that the engine has.
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
        """Sequences are the engine's from now on. They are sent to it at once, or when it is ready."""
        self._own += num_sequences

    def send(self, num_sequences: int, num_new_tokens: int) -> None:
        """Sequences are sent to the engine, with so many tokens that it has to compute first."""
        self._sent += num_sequences
        self._pending += num_new_tokens

    def remove(self, num_sequences: int) -> None:
        """Sequences have ended, or went to another engine."""
        self._own -= num_sequences

    def report(self, stats: SchedulerStats) -> None:
        """The engine has reported."""
        self._reported = stats.num_running + stats.num_waiting
        self._sent = 0
        self._pending = stats.num_pending_tokens

    def forget(self) -> None:
        """The engine has ended, and its reports with it."""
        self._reported = self._sent = self._pending = 0
