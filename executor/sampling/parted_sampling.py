"""Samples the rows of a step in parts, where its device has too little memory left for all of them at once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.row_outputs import TokenLogprobs
from quire.executor.sampling.logprobs import StepLogprobs
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.transfers import to_device
from quire.ops.sampling import new_tokens


class ChosenRows(NamedTuple):
    """The tokens of some rows of logits.

    Attributes:
        tokens: ids and whether each is usable, as in `Sampled`.
        logprobs: None if no row asked.
    """

    tokens: tuple[Tensor, Tensor]
    logprobs: StepLogprobs | None


class PartedLogprobs:
    """Log-probabilities of parts of a step's rows.

    Args:
        parts: each with the step's rows that it has.
    """

    def __init__(self, parts: Sequence[tuple[np.ndarray, StepLogprobs]]) -> None:
        self._parts = parts

    def rows(self) -> list[tuple[int, TokenLogprobs]]:
        """See `StepLogprobs.rows`."""
        return [(int(rows[place]), entry) for rows, part in self._parts for place, entry in part.rows()]


class PartedRows(NamedTuple):
    """What was sampled in parts.

    Attributes:
        tokens: as in `ChosenRows`; not usable for rows without memory.
        failed: rows without memory.
    """

    tokens: tuple[Tensor, Tensor]
    logprobs: PartedLogprobs | None
    failed: list[int]


def sample_in_parts(
    sample: Callable[[Tensor, SampleBatch], ChosenRows],
    logits: Tensor,
    batch: SampleBatch,
    release: Callable[[], None],
) -> PartedRows:
    """Samples rows with `sample`, which may change the logits that it is given.

    A part without enough memory is halved, between requests. `release` is called before, and returns to the device what
    nothing uses. A request that does not fit alone has no token.
    """
    token_ids, usable = new_tokens(len(batch.slots), logits.device)
    token_ids.zero_()
    usable.zero_()
    parts: list[tuple[np.ndarray, StepLogprobs]] = []
    failed: list[int] = []
    waiting = [np.arange(len(batch.slots))]
    while waiting:
        rows = waiting.pop()
        chosen = _attempt(sample, logits, batch, rows)
        if chosen is None:
            release()
            halves = _halve(rows, batch.slots[rows])
            failed += [] if halves else rows.tolist()
            waiting += reversed(halves)
            continue
        index = to_device(rows, logits.device)
        for whole, own in zip((token_ids, usable), chosen.tokens, strict=True):
            whole[index] = own
        if chosen.logprobs is not None:
            parts.append((rows, chosen.logprobs))
    return PartedRows((token_ids, usable), PartedLogprobs(parts) if parts else None, failed)


def _attempt(
    sample: Callable[[Tensor, SampleBatch], ChosenRows], logits: Tensor, batch: SampleBatch, rows: np.ndarray
) -> ChosenRows | None:
    """The tokens of some rows, or None if the memory does not suffice."""
    try:
        return sample(logits[to_device(rows, logits.device)], batch.take(rows))
    except torch.OutOfMemoryError:
        return None


def _halve(rows: np.ndarray, slots: np.ndarray) -> list[np.ndarray]:
    """Cuts rows in two, between two requests; empty if all are of one."""
    cuts = np.flatnonzero(np.diff(slots)) + 1
    if not len(cuts):
        return []
    middle = cuts[np.abs(cuts - len(rows) / 2).argmin()]
    return [rows[:middle], rows[middle:]]
