"""The interface of a head: computes one kind of output from the hidden states of a step's rows."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from quire.core.wire.protocol import StepPlan
from quire.core.wire.row_outputs import OutputKind, RowOutput
from quire.executor.sampling.token_table import TokenTable
from quire.executor.step.slot_state import SlotState


class HeadRow(NamedTuple):
    """A row of a step that wants a head's output.

    Attributes:
        row: its index in the plan.
        start: the position of its first token.
        first: the index of that token among those of the step.
        hidden: [num_tokens, hidden]; the model's last hidden states of its tokens.
    """

    row: int
    slot: int
    start: int
    first: int
    hidden: Tensor

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.hidden)


class PendingOutput(Protocol):
    """The output of one row, on its way to the host.

    Attributes:
        row: as in `HeadRow`.
    """

    @property
    def row(self) -> int: ...

    def read(self) -> RowOutput:
        """Returns the value. Waits until the device has computed it."""
        ...


class Head(SlotState, Protocol):
    """Computes one kind of output. Parameters of a request come with its admission."""

    def launch(self, rows: Sequence[HeadRow], table: TokenTable) -> list[PendingOutput]:
        """Queues the computation of the output of `rows`. A row may have none yet, if more of its prompt follows."""
        ...


Heads = Mapping[OutputKind, Head]
"""The head of each kind of output."""


def rows_by_kind(plan: StepPlan, hidden: Tensor) -> dict[OutputKind, list[HeadRow]]:
    """Groups the plan's rows that want outputs; `hidden` is [num_tokens, hidden] of all rows, one after another."""
    ends = np.cumsum(plan.num_scheduled).tolist()
    found: dict[OutputKind, list[HeadRow]] = {}
    for row, kind in plan.outputs:
        first = ends[row] - plan.num_scheduled[row]
        found.setdefault(kind, []).append(
            HeadRow(row, plan.slots[row], plan.num_computed[row], first, hidden[first : ends[row]])
        )
    return found
