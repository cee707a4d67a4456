"""The places of a decode step's columns in the memory that all such steps share: on the host, and on the device."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from quire.executor.sampling.recorded_sampler import Choice
from quire.executor.step.choice_columns import ChoiceColumns
from quire.executor.step.input_batch import InputBatch

View = TypeVar("View", np.ndarray, Tensor)


class Columns(NamedTuple, Generic[View]):
    """What a step copies to the device: a value or a line of a table for each row, on the host or there.

    Attributes:
        places, next_places: of the tokens to read and of those that will be sampled.
        slot_mappings, block_tables: by KV group.
        state_tables: the slots as a block table, if states have first rows; else none.
        adapters: those of the rows, if the table has any; else none.
        cross_lens, cross_tables: of encoder inputs, if there are any: their lengths, and a table by KV group.
    """

    places: View
    next_places: View
    slots: View
    positions: View
    is_new: View
    lens: View
    slot_mappings: list[View]
    block_tables: list[View]
    state_tables: list[View]
    adapters: list[View]
    cross_lens: list[View]
    cross_tables: list[View]


class Views(NamedTuple):
    """The batch of steps with one shape and one number of rows, and the host's side of these rows.

    Attributes:
        num_bytes: of the columns that all steps have.
        query_lens: new tokens of each sequence.
        seq_lens: of each sequence.
        wanted_positions: of the tokens that will be sampled; of each row.
        lens: the same, for the device.
        next_places: of the tokens that will be sampled.
        read_ids: reads the rows' token ids at `places`; None: the step itself does.
        padding: views of the other rows, and the value that each gets.
        state_tables: empty if no state has first rows.
        adapters: empty if the table has none.
        adapted: the batch if a row has an adapter.
        cross_lens: rows of the encoder inputs, twice: for the host and the device. None: the model has no encoder.
        cross_tables: by KV group of the kind "cross".
        choices: None where no recording chooses tokens.
        choosing: the batches of such steps, by how tokens are chosen and whether a row has an adapter.
    """

    batch: InputBatch
    places: np.ndarray
    next_places: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    is_new: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    wanted_positions: np.ndarray
    lens: np.ndarray
    slot_mappings: list[np.ndarray]
    num_bytes: int
    read_ids: Callable[[], None] | None
    padding: list[tuple[np.ndarray, int]]
    state_tables: list[np.ndarray]
    adapters: list[np.ndarray]
    adapted: InputBatch
    cross_lens: tuple[np.ndarray, np.ndarray] | None
    cross_tables: list[np.ndarray]
    choices: ChoiceColumns | None
    choosing: dict[tuple[Choice, bool], InputBatch]
