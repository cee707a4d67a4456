"""Sampling inside of recordings: a step's graph chooses the tokens of rows that need nothing of the host.

The parameters of such rows are among the step's inputs. Their tokens are written to a ring, so that they stay in place
while later steps run and copies bring them to the host.
"""

from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.executor.sampling.sampler import Sampler
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.sampling.token_table import TokenTable
from quire.ops.sampling import (
    RowParameters,
    SamplingOperations,
    ScorePlaces,
    TokenPlaces,
    new_scores,
    num_token_bytes,
    tokens_in,
)

_NUM_TURNS = 8
"""The steps whose tokens are kept: more than are in flight."""
_UNIT = 16
"""Bytes that a turn of the ring is a multiple of."""


class Choice(Enum):
    """How a recording chooses the tokens of its rows, and whether it also scores them."""

    LIKELIEST = auto()
    """All rows want the likeliest token of the model's own logits."""
    ANY = auto()
    """Rows draw, or have penalties."""
    SCORED_LIKELIEST = auto()
    SCORED = auto()
    """Like `ANY`."""

    @property
    def has_parameters(self) -> bool:
        return self in (Choice.ANY, Choice.SCORED)

    @property
    def is_scored(self) -> bool:
        """True if rows want log-probabilities, or logits."""
        return self in (Choice.SCORED_LIKELIEST, Choice.SCORED)


class ChosenTokens(NamedTuple):
    """The tokens of a step, on the device; they stay for the next few turns.

    Attributes:
        token_ids: [num_rows] int64.
        usable: [num_rows] bool; false where the row's logits were NaN or infinite.
        scores: [num_rows, ...] int32, as `read_scores` takes them; None: nobody asked.
    """

    token_ids: Tensor
    usable: Tensor
    scores: Tensor | None = None


class SlotColumn(NamedTuple):
    """A parameter of requests.

    Attributes:
        values: [max_num_seqs]; by slot.
        neutral: that of a row that asks nothing.
    """

    values: np.ndarray
    neutral: float


class ChosenRows(NamedTuple):
    """The rows of a step whose tokens its recording chooses.

    Attributes:
        parameters: None if `choice` needs none.
        places: [num_rows] int64, on the device; of the chosen tokens in the request table's memory.
        turn: [1] int64, on the device; the place in the ring.
    """

    choice: Choice
    parameters: RowParameters | None
    places: Tensor
    turn: Tensor


class RecordedSampler:
    """Chooses tokens inside of recordings.

    Args:
        max_rows: of a step that is recorded, with its padding.
    """

    def __init__(self, sampler: Sampler, ops: SamplingOperations, table: TokenTable, max_rows: int) -> None:
        self._sampler = sampler
        self._ops = ops
        self._table = table
        self._turn = 0
        row_bytes = -(-num_token_bytes(max_rows) // _UNIT) * _UNIT
        self._ring = torch.zeros(_NUM_TURNS, row_bytes, dtype=torch.uint8, device=table.device)
        self._scores = ScorePlaces(new_scores(_NUM_TURNS, max_rows, table.device), sampler.scores_are_logprobs)

    @property
    def columns(self) -> dict[str, SlotColumn]:
        """The parameters of each slot, by their names in `RowParameters`."""
        table = self._table
        return {
            "num_unnamed": SlotColumn(table.num_unnamed, 0),
            "num_prompt_tokens": SlotColumn(table.num_prompt_tokens, 0),
            **{name: SlotColumn(*each) for name, each in self._sampler.columns.items()},
        }

    def choice(self, slots: np.ndarray, positions: np.ndarray) -> Choice | None:
        """Returns how a recording may choose the tokens of a step; None: its logits have to be sampled elsewhere."""
        asks = self._sampler.asks_of_device(SampleBatch(slots, positions, self._table))
        if asks is None:
            return None
        if asks.scores:
            return Choice.SCORED if asks.parameters else Choice.SCORED_LIKELIEST
        return Choice.ANY if asks.parameters else Choice.LIKELIEST

    def next_turn(self) -> int:
        """Returns the place of the next step's tokens in the ring."""
        self._turn = (self._turn + 1) % _NUM_TURNS
        return self._turn

    def choose(self, logits: Tensor, rows: ChosenRows) -> bool:
        """Chooses tokens for `logits` [num_rows, vocab_size], with operations that can be recorded.

        Returns False, and does nothing, if other operations serve such logits better.
        """
        if not self._ops.is_recordable(logits):
            return False
        table = self._table
        scores = self._scores if rows.choice.is_scored else None
        self._ops.choose(
            logits,
            rows.parameters,
            TokenPlaces(table.token_ids, table.memory, rows.places, self._ring, rows.turn, scores),
        )
        return True

    def tokens(self, num_rows: int, choice: Choice) -> ChosenTokens:
        """Returns the tokens of the last turn, which were chosen in this way."""
        scores = self._scores.ring[self._turn, :num_rows] if choice.is_scored else None
        return ChosenTokens(*tokens_in(self._ring[self._turn], num_rows), scores)
