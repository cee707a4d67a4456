"""Bounds the tokens of long prompts in a step, so that the streams beside them slow down by a known factor at most.

A step costs a part that each step has, and a part for each prompt token. Both are measured as results come. Beside
running streams, the long prompts of a step get as many tokens as make it cost `slowdown` times a step without them.
Short prompts, those that fit into one step, are computed whole: each stream waits for such a step once.
"""

from quire.core.scheduling.in_flight import StepInFlight

MIN_TOKENS = 16
"""The least that a long prompt gets, whatever was measured: its page's worth."""
NEWEST = 0.2
"""The weight of the newest measurement in the mean."""


class Pace:
    """Use `begin` before each plan, then `take`.

    Args:
        slowdown: the factor, above 1; 0 bounds nothing.
        longest_short: tokens of the longest prompt that counts as short.
    """

    def __init__(self, slowdown: float, longest_short: int) -> None:
        self._slowdown = slowdown
        self._longest_short = longest_short
        self._step_seconds = 0.0  # of a step without prompts; 0 until one was measured
        self._token_seconds = 0.0  # that each token of a prompt adds; 0 until known
        self._last_result_at = 0.0
        self._left: int | None = None  # tokens for long prompts in the step that is planned; None: no bound

    @property
    def is_bounding(self) -> bool:
        """True if the step that is planned has a bound."""
        return self._left is not None

    def begin(self, *, is_beside_streams: bool) -> None:
        """Begins a plan. `is_beside_streams`: streams run, which shall not slow down more."""
        self._left = None
        if self._slowdown and is_beside_streams and self._step_seconds and self._token_seconds:
            num_tokens = (self._slowdown - 1) * self._step_seconds / self._token_seconds
            self._left = max(MIN_TOKENS, int(num_tokens))

    def budget(self, num_prompt_tokens: int, budget: int) -> int:
        """The part of a step's budget that a request with such a prompt may have."""
        if self._left is None or num_prompt_tokens <= self._longest_short:
            return budget
        return min(budget, max(self._left, MIN_TOKENS))

    def take(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """Notes that the plan has `num_tokens` tokens of a prompt."""
        if self._left is not None and num_prompt_tokens > self._longest_short:
            self._left -= num_tokens

    def measure(self, step: StepInFlight, now: float) -> None:
        """Takes in the time of a step whose result has come."""
        seconds = now - max(step.planned_at, self._last_result_at)  # steps run one after the other
        self._last_result_at = now
        if seconds <= 0 or not step.plan.slots:
            return
        rows = zip(step.plan.num_scheduled, step.plan.num_wanted, strict=True)
        num_prompt_tokens = sum(count for count, wanted in rows if count > max(1, wanted))
        if not num_prompt_tokens:
            self._step_seconds = _mean(self._step_seconds, seconds)
        elif num_prompt_tokens >= MIN_TOKENS:
            beyond = max(seconds - self._step_seconds, seconds / 10)
            self._token_seconds = _mean(self._token_seconds, beyond / num_prompt_tokens)


def _mean(before: float, newest: float) -> float:
    return newest if not before else before + NEWEST * (newest - before)
