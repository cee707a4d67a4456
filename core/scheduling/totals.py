"""The scheduler's totals since its start, for its statistics."""

from quire.core.scheduling.in_flight import StepInFlight
from quire.core.scheduling.request import RequestStatus
from quire.core.scheduling.throughput import Throughput
from quire.core.wire.protocol import StepResult


class Totals:
    """Totals since the start. `SchedulerStats` explains those without a note here.

    Args:
        now: seconds of the scheduler's clock.

    Attributes:
        started_at: seconds of the scheduler's clock.
        num_planned_prompt_tokens: of prompts, planned for the first time; steps in flight are among them.
        expert_balancedness: the last, and no sum.
        throughput: the recent rate.
    """

    def __init__(self, now: float) -> None:
        self.started_at = now
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_planned_prompt_tokens = 0
        self.num_prefilled_tokens = 0
        self.num_generated_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_by_position: list[int] = []
        self.expert_balancedness: float | None = None
        self.throughput = Throughput(now)

    def add_prefilled(self, step: StepInFlight) -> None:
        """Counts the prompts whose first token a step brings, without their cached tokens."""
        for request in step.prefilled:
            if request.status is not RequestStatus.FINISHED and not request.output_token_ids:
                self.num_prefilled_tokens += request.num_prompt_tokens - request.num_cached_tokens

    def add_drafts(self, num_checked: int, num_accepted: int) -> None:
        """Counts the drafts of a row."""
        self.num_drafts += 1
        self.num_draft_tokens += num_checked
        counts = self.num_accepted_by_position
        counts += [0] * (num_checked - len(counts))
        for place in range(num_accepted):
            counts[place] += 1

    def add_step(self, result: StepResult, now: float, *, num_tokens: int, num_finished: int) -> None:
        """Counts the result of a step.

        Args:
            num_tokens: sampled for unfinished requests.
            num_finished: requests that ended with it.
        """
        self.expert_balancedness = result.expert_balancedness
        self.num_generated_tokens += num_tokens
        self.num_steps += bool(num_tokens)
        self.throughput.record(now, num_tokens, num_finished)
