"""Takes the states of recurrent layers back over rejected drafts.

A state has no positions: the step that checks drafts leaves it after all of them. So the states of rows with drafts are
copied before the step. Where drafts are rejected, the copy is put back, and the model computes the accepted tokens
again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.core.wire.protocol import StepPlan
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import build_input_batch
from quire.executor.step.media_inputs import MediaInputs
from quire.executor.step.request_table import RequestTable
from quire.executor.transfers import to_device


class SavedStates(NamedTuple):
    """The states of a step's rows with drafts, as they were before the step.

    Attributes:
        rows: [num_rows] int64, on the host; the rows of the plan.
        states: by layer, its tensors of these rows.
    """

    rows: np.ndarray
    states: list[list[Tensor]]


class StateRewind:
    """Copies the states of slots, and puts them back.

    Args:
        states: by recurrent layer, tensors whose first dimension is the slot.
        media: knows the places that tokens are rotated by; None: the model reads text alone.
    """

    def __init__(
        self,
        forward: Forward,
        states: Sequence[Sequence[Tensor]],
        table: RequestTable,
        media: MediaInputs | None = None,
    ) -> None:
        self._forward = forward
        self._states = states
        self._table = table
        self._media = media

    def save(self, plan: StepPlan) -> SavedStates | None:
        """Copies the states of rows with drafts, before the step; None if there are none."""
        rows = np.array([row for row, wanted in enumerate(plan.num_wanted) if wanted > 1], np.int64)
        if not len(rows) or not self._states:
            return None
        slots = to_device(np.asarray(plan.slots)[rows], self._table.device)
        return SavedStates(rows, [[tensor[slots] for tensor in layer] for layer in self._states])

    def settle(self, plan: StepPlan, saved: SavedStates, num_tokens: np.ndarray) -> None:
        """Brings each saved row's states to the tokens that are known and computed.

        Args:
            num_tokens: [rows of the plan] int64, on the host; the new tokens of each row that samples.
        """
        rejected = np.flatnonzero(num_tokens[saved.rows] < np.asarray(plan.num_wanted)[saved.rows])
        if not len(rejected):
            return
        rows = saved.rows[rejected]
        slots = np.asarray(plan.slots)[rows]
        there, index = to_device(slots, self._table.device), to_device(rejected, self._table.device)
        for layer, copies in zip(self._states, saved.states, strict=True):
            for tensor, copy in zip(layer, copies, strict=True):
                tensor[there] = copy[index]
        columns = (slots.tolist(), np.asarray(plan.num_computed)[rows].tolist(), num_tokens[rows].tolist())
        again = StepPlan(plan.step_id, [], [], *columns, [0] * len(rows), [])
        batch = build_input_batch(again, self._table, has_states=True)
        self._forward.logits(batch if self._media is None else self._media.place(again, batch))
