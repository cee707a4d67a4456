"""The steps in flight: plans without a result yet, in the order of their execution."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quire.core.errors import EngineError
from quire.core.scheduling.request import Request
from quire.core.wire.protocol import StepPlan, StepResult


class StepInFlight(NamedTuple):
    """A plan whose result has not come back."""

    plan: StepPlan
    requests: list[Request]  # of the rows that want tokens, in row order
    prefilled: list[Request]  # of those, the ones whose prompts end in this step
    others: dict[int, Request]  # by row, of the rows that want no token, or another output besides
    num_prompt_tokens: int  # computed for the first time, by this step and all before it
    planned_at: float  # seconds of the scheduler's clock

    def request_of(self, row: int) -> Request:
        """Returns the request of a row."""
        if row in self.others:
            return self.others[row]
        return self.requests[sum(map(bool, self.plan.num_wanted[:row]))]


class StepsInFlight:
    """The engine process's only list of steps in flight.

    Args:
        clock: seconds, monotonic.

    Attributes:
        num_prompt_tokens_done: tokens of prompts that the steps computed for the first time whose results have come
            back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: deque[StepInFlight] = deque()
        self.num_prompt_tokens_done = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def seconds(self) -> float:
        """The age of the oldest step; 0 when none is in flight."""
        return self._clock() - self._steps[0].planned_at if self._steps else 0.0

    def add(
        self,
        plan: StepPlan,
        requests: list[Request],
        prefilled: list[Request],
        others: dict[int, Request],
        num_prompt_tokens: int,
    ) -> None:
        """Adds a step; the arguments are as in `StepInFlight`."""
        self._steps.append(StepInFlight(plan, requests, prefilled, others, num_prompt_tokens, self._clock()))

    def complete(self, result: StepResult) -> StepInFlight:
        """Removes and returns the oldest step. Raises EngineError when `result` does not answer it."""
        step = self._steps.popleft()
        if step.plan.step_id != result.step_id or len(step.requests) != len(result.token_ids):
            raise EngineError(
                f"The workers answered step {result.step_id} with {len(result.token_ids)} rows; "
                f"step {step.plan.step_id} with {len(step.requests)} was next."
            )
        self.num_prompt_tokens_done = step.num_prompt_tokens
        return step

    def check_invariants(self, request: Request) -> None:
        """Asserts that `request` counts the tokens that these steps will bring."""
        wanted = [
            num_wanted
            for step in self._steps
            for other, num_wanted in zip(step.requests, filter(None, step.plan.num_wanted), strict=True)
            if other is request
        ]
        if max(wanted, default=0) > 1:
            assert wanted == [1 + request.num_drafts], f"{request.request_id} was planned beside a row with drafts"
            assert request.num_placeholders == request.num_drafts, f"{request.request_id} miscounts its drafts"
        else:
            num_in_flight = request.num_placeholders - request.num_drafts
            assert len(wanted) == num_in_flight, f"{request.request_id} miscounts its tokens in flight"
