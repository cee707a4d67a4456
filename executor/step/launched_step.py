"""A step between its launch and its result."""

from dataclasses import dataclass

from quire.executor.sampling.prompt_scorer import ScoredPart
from quire.executor.step.row_sampler import SampledRows
from quire.executor.transfers import Transfer


@dataclass(frozen=True)
class LaunchedStep:
    """The work that a launch gave the device for one plan, and the values to be read of it.

    Attributes:
        step_id: the plan's.
        launched_at: CLOCK_MONOTONIC seconds at which the launch began.
        rows: the tokens of rows that want any; None if none does.
        scored: prompts' log-probabilities.
        end: a transfer of no values, queued after all others.
    """

    step_id: int
    launched_at: float
    rows: SampledRows | None
    scored: list[ScoredPart]
    end: Transfer

    @property
    def is_done(self) -> bool:
        """Whether the device has done the whole step, so that reading it needs no wait."""
        return self.end.is_done
