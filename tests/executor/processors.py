"""Logits processors, named by string in tests."""

import numpy as np
import torch

from quire import LogitsProcessor
from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.custom import ProcessorContext
from quire.executor.sampling.sampling_feature import SampleBatch


class Forced(LogitsProcessor):
    """Samples `forced_token_id` at every even place of the output."""

    def __init__(self, context: ProcessorContext) -> None:
        self._token_ids = np.zeros(context.max_num_seqs, np.int64)

    def admit(self, request: NewSlot) -> bool:
        token_id = (request.sampling.extra_args or {}).get("forced_token_id")
        if token_id is not None and not isinstance(token_id, int):
            raise ValueError(f"forced_token_id must be a token id, got {token_id!r}")
        self._token_ids[request.slot] = token_id or 0
        return token_id is not None

    def used(self, batch: SampleBatch) -> np.ndarray:
        return (batch.positions - batch.num_prompt_tokens) % 2 == 0

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).scatter_(1, batch.column(self._token_ids), 0.0)


class NeverTwice(LogitsProcessor):
    """Excludes the newest token."""

    can_go_back = True

    def admit(self, request: NewSlot) -> bool:
        return True

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        newest = batch.table.gather(batch.slots, batch.positions - 1)
        return logits.scatter_(1, newest.unsqueeze(1), -torch.inf)


class NeverTwiceOnce(NeverTwice):
    """The same, and does not say that it can go back."""

    can_go_back = False


class Broken(LogitsProcessor):
    """Raises for requests that ask for it."""

    def admit(self, request: NewSlot) -> bool:
        return bool((request.sampling.extra_args or {}).get("broken"))

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        raise RuntimeError("broken as asked")


class BreaksLater(LogitsProcessor):
    """Raises at a position of the output that the request names."""

    def __init__(self, context: ProcessorContext) -> None:
        self._places = np.zeros(context.max_num_seqs, np.int64)

    def admit(self, request: NewSlot) -> bool:
        place = (request.sampling.extra_args or {}).get("breaks_at")
        self._places[request.slot] = place or 0
        return place is not None

    def used(self, batch: SampleBatch) -> np.ndarray:
        return batch.positions - batch.num_prompt_tokens >= self._places[batch.slots]

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        raise RuntimeError("broken as asked")


class Unbuildable(Broken):
    def __init__(self, context: ProcessorContext) -> None:
        raise OSError("no table")


class NoProcessor:
    pass
