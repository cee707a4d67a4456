"""The interface of sampling features, and the batch that they see of a step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.token_table import TokenTable
from quire.executor.transfers import to_device


@dataclass(frozen=True)
class SampleBatch:
    """The positions at which a step samples a token, with one row of logits each. A request may have several.

    Attributes:
        slots: [num_rows] int64, on the host.
        positions: [num_rows] int64, on the host; the place that the sampled token will take in its sequence, which is
            also the number of tokens known before it.
        table: the worker's requests; the tokens before `positions` are in it.
    """

    slots: np.ndarray
    positions: np.ndarray
    table: TokenTable

    def take(self, rows: np.ndarray) -> "SampleBatch":
        """The batch of some rows only, by index, in order."""
        return self if len(rows) == len(self.slots) else SampleBatch(self.slots[rows], self.positions[rows], self.table)

    @property
    def num_prompt_tokens(self) -> np.ndarray:
        return self.table.num_prompt_tokens[self.slots]

    def column(self, values: np.ndarray) -> torch.Tensor:
        """Returns a slot-indexed column as [num_rows, 1] on the device, for arithmetic with logits."""
        return self.on_device(values[self.slots]).unsqueeze(1)

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        """Copies `array` to the logits' device; the host does not wait for the copy."""
        return to_device(array, self.table.device)


class SamplingFeature(ABC):
    """One way to change logits before a token is chosen, with slot-indexed columns of its parameters.

    Attributes:
        can_go_back: its effect at a position depends only on the request and the tokens before it in the table.
            So a position may be sampled again after other tokens, for example after a wrong draft. A request that
            wants a feature that cannot go back gets no drafts.
    """

    can_go_back: bool = True

    @abstractmethod
    def admit(self, request: NewSlot) -> bool:
        """Adds the parameters of a request that enters a slot; returns True if it may ever want this feature.

        Slots are reused, so the parameters of the last request must be overwritten in either case.
        """

    def release(self, slots: list[int]) -> None:  # noqa: B027 - small things may stay until the slot is used again
        """Drops the requests in these slots. For features that store much for a request, or do work for it."""

    @abstractmethod
    def used(self, batch: SampleBatch) -> np.ndarray:
        """Returns the rows that want this feature in this step: [num_rows] bool. Other rows cost nothing.

        Called only in steps with a request that may want it: see `admit`.
        """


class LogitsFeature(SamplingFeature):
    """A feature that computes, in float32."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Changed logits, [num_rows, vocab_size] float32, of rows that all use it; may change its input in place."""


class Mask(SamplingFeature):
    """A feature that only takes tokens away, in the tensor that the model wrote.

    A step with masks alone therefore copies no logits: it converts no types and gathers no rows.
    """

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: np.ndarray, batch: SampleBatch) -> None:
        """Sets logits of forbidden tokens to -inf, in place.

        Args:
            logits: [all rows of the step, vocab_size] of any float type.
            rows: [num_rows] int64, on the host; the rows of `logits` that use this mask, in order.
            batch: the batch of these rows.
        """


class FollowingMask(Mask):
    """A mask that the host derives from every token of the output. The sampler passes it each token once, in order.

    Rows of one request are neighbours. The tokens between their positions are drafts: the mask walks along these, and
    goes back once all rows are masked.
    """

    @abstractmethod
    def advance(self, slots: np.ndarray, token_ids: list[int], usable: list[bool]) -> list[int]:
        """Takes the tokens that a step has sampled, before the next mask is made.

        Tokens of a request after one that differs from the draft there are not part of its output.

        Args:
            slots: [num_rows] int64; -1 where the request has left its slot since.
            token_ids: [num_rows]; arbitrary where not `usable`.

        Returns:
            Rows whose token the mask had forbidden, which a later feature brought back.
        """


def drafts_between(batch: SampleBatch) -> dict[int, list[int]]:
    """The drafts that a step checks, by slot: each request's tokens between its rows, of requests with several rows."""
    follows = np.flatnonzero(batch.slots[1:] == batch.slots[:-1])
    if not len(follows):
        return {}
    found: dict[int, list[int]] = {}
    token_ids = batch.table.gather(batch.slots[follows], batch.positions[follows]).tolist()
    for slot, token_id in zip(batch.slots[follows].tolist(), token_ids, strict=True):
        found.setdefault(slot, []).append(token_id)
    return found
