"""The sampler's parameters among the inputs of decode steps, for recordings that choose tokens."""

import numpy as np
import torch
from torch import Tensor

from quire.executor.sampling.recorded_sampler import Choice, ChosenRows, RecordedSampler
from quire.executor.step.step_columns import StepColumn, lay_out
from quire.executor.transfers import Mirror
from quire.ops.sampling import RowParameters


class ChoiceColumns:
    """The parameters of steps with one number of rows and one shape. They lie behind the step's other columns.

    Args:
        start: their first byte in the memory of `mirror`.
        num_padded: the step's rows with its padding.
        slots: [num_padded] int64, on the device.
        places: like `slots`; see `ChosenRows`.
    """

    def __init__(
        self,
        sampler: RecordedSampler,
        mirror: Mirror,
        start: int,
        num_rows: int,
        num_padded: int,
        slots: Tensor,
        places: Tensor,
    ) -> None:
        self._sampler = sampler
        turn, positions, *others = choice_columns(sampler, start, num_padded)
        host, parameters = torch.from_numpy(mirror.host), sampler.columns
        self._turn, here = turn.of(host).numpy(), [column.of(host).numpy() for column in (positions, *others)]
        self._positions, *self._values = (column[:num_rows] for column in here)
        self._sources = [each.values for each in parameters.values()]
        neutrals = [1, *(each.neutral for each in parameters.values())]
        self._padding = [(column[num_rows:], neutral) for column, neutral in zip(here, neutrals, strict=True)]
        there = {name: column.of(mirror.there) for name, column in zip(parameters, others, strict=True)}
        rows = RowParameters(slots=slots, positions=positions.of(mirror.there), **there)
        turn_there = turn.of(mirror.there)
        self._chosen = {
            each: ChosenRows(each, rows if each.has_parameters else None, places, turn_there) for each in Choice
        }
        self._num_bytes = {False: turn.stop, True: [positions, *others][-1].stop}  # with parameters or without

    def fill(self, slots: np.ndarray, positions: np.ndarray) -> tuple[ChosenRows, int] | None:
        """Writes the parameters of a step whose rows sample tokens at `positions` [num_rows].

        Returns the rows, and the bytes of the step's columns with theirs; None: no recording can choose the tokens.
        """
        choice = self._sampler.choice(slots, positions)
        if choice is None:
            return None
        self._turn[0] = self._sampler.next_turn()
        if choice.has_parameters:
            self._positions[:] = positions
            for column, values in zip(self._values, self._sources, strict=True):
                column[:] = values[slots]
            for rest, neutral in self._padding:
                rest[:] = neutral
        return self._chosen[choice], self._num_bytes[choice.has_parameters]


def choice_columns(sampler: RecordedSampler, start: int, num_padded: int) -> list[StepColumn]:
    """Lays out the turn, the positions, and the parameters, from the byte `start` on."""
    rows = (num_padded,)
    kinds = [(torch.from_numpy(each.values).dtype, rows) for each in sampler.columns.values()]
    return lay_out([(torch.int64, (1,)), (torch.int64, rows), *kinds], start)
