"""Recordings: a step's operations that a backend can run again."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

DraftsAs = Literal["rows", "sequences"]


class RecordingRules(NamedTuple):
    """The decode steps that a backend records.

    Attributes:
        row_counts: ascending; a step with fewer rows is padded to one of these. A step with more is not padded. Empty:
            none is padded. Operations then take rows of padding, also without states (`StateRows.slots`).
        max_seq_lens: ascending bounds on the lengths of sequences; a recording serves one of them. Empty: a recording
            serves all lengths.
        interval: the least number of steps from one recording to the next, because a recording delays its step.
        drafts_as: how a recorded step that checks drafts has its tokens. "sequences": operations read from memory how
            many of the tokens each sequence has. "rows": each token is a row, and those of a sequence share its pages
            (`DeviceRows.are_apart`). None: such steps are not recorded.
        max_rows: steps with more rows are not recorded; None: all are.
        shared_bytes: memory that recordings share, beside a step's activations and logits.
        each_bytes: memory of each recording.
    """

    row_counts: Sequence[int] = ()
    max_seq_lens: Sequence[int] = ()
    interval: int = 1
    drafts_as: DraftsAs | None = None
    max_rows: int | None = None
    shared_bytes: int = 0
    each_bytes: int = 0


class Recording(Protocol):
    """Recorded operations, which can run again on the memory that they were recorded with."""

    def run(self) -> None:
        """Runs all operations, in order."""
        ...

    def run_timed(self) -> list[float]:
        """Runs all operations; returns the CLOCK_MONOTONIC time in seconds at which each was done.

        One time is returned for all where they are launched as one.
        """
        ...
