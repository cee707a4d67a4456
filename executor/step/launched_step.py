"""A step between its launch and its result."""

from dataclasses import dataclass, field

from quire.executor.step.heads.head import PendingOutput
from quire.executor.step.row_sampler import SampledRows
from quire.executor.transfers import Transfer


@dataclass(frozen=True)
class LaunchedStep:
    """The device's work for one plan, and the transfers of its results.

    Attributes:
        step_id: the plan's.
        launched_at: CLOCK_MONOTONIC seconds at which the launch began.
        rows: the tokens of rows that want any; None if none does.
        outputs: of heads.
        moved: ids of moves of pages that are done once the step is.
        end: a transfer of no values, queued after all others.
        failed: rows of the plan for which the device has no memory.
    """

    step_id: int
    launched_at: float
    rows: SampledRows | None
    outputs: list[PendingOutput]
    moved: list[int]
    end: Transfer
    failed: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        """True if the device has finished the step, so that reading its result does not block."""
        return self.end.is_done
