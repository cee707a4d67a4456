"""The number of a prompt's tokens that a step computes."""

from typing import Protocol

from quire.core.config.resolved import SchedulerLimits


class PrefillPolicy(Protocol):
    def chunk_size(self, num_tokens: int, budget: int, border: int, beside: int = 0) -> int:
        """The number of a request's `num_tokens` uncomputed tokens to compute in a step with `budget` tokens left.

        A snapshot of its recurrent state is due after `border` of them, if the step ends there. The step also encodes
        `beside` rows for the request, which the budget does not include.
        """


class ChunkedPrefill:
    """Prompts are split: a step computes as many tokens as its budget and the threshold for long prompts allow.

    A chunk ends where a snapshot is due.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._chunk = limits.largest_chunk

    def chunk_size(self, num_tokens: int, budget: int, border: int, beside: int = 0) -> int:
        return min(num_tokens, budget, self._chunk, border)


class WholePrefill:
    """A prompt is computed in one step or waits, wherever snapshots are due.

    Only a recomputation longer than any step's budget is split.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._max_num_batched_tokens = limits.max_num_batched_tokens

    def chunk_size(self, num_tokens: int, budget: int, border: int, beside: int = 0) -> int:
        if num_tokens <= budget:
            return num_tokens
        return budget if num_tokens + beside > self._max_num_batched_tokens else 0
