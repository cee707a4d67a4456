"""Tokens at the ends of an output: those that cannot be the first, and the only ones for the last of full length."""

from collections.abc import Sequence

import numpy as np
import torch

from quire.core.wire.output_rules import OutputRules
from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampling_feature import Mask, SampleBatch

_NEVER = -1


class EdgeTokens(Mask):
    """Masks the first and the last token of requests with `OutputRules`."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._first = np.full(max_num_seqs, _NEVER)  # places in the output; `_NEVER`: no rule
        self._last = np.full(max_num_seqs, _NEVER)
        self._rules: dict[int, OutputRules] = {}  # by slot

    def admit(self, request: NewSlot) -> bool:
        rules = request.rules
        self._first[request.slot] = 0 if rules is not None and rules.not_first else _NEVER
        self._last[request.slot] = rules.length - 1 if rules is not None and rules.last else _NEVER
        self._rules.pop(request.slot, None)
        if rules is not None:
            self._rules[request.slot] = rules
        return rules is not None

    def used(self, batch: SampleBatch) -> np.ndarray:
        places = batch.positions - batch.num_prompt_tokens
        return (places == self._first[batch.slots]) | (places == self._last[batch.slots])

    def apply(self, logits: torch.Tensor, rows: np.ndarray, batch: SampleBatch) -> None:
        places = batch.positions - batch.num_prompt_tokens
        for row, slot, place in zip(rows.tolist(), batch.slots.tolist(), places.tolist(), strict=True):
            rules = self._rules[slot]
            if place == self._first[slot]:
                logits[row, self._known(rules.not_first, batch)] = -torch.inf
            if place == self._last[slot]:
                logits[row] = -torch.inf
                logits[row, self._known(rules.last, batch)] = 0.0  # whatever else rules them out

    def _known(self, token_ids: Sequence[int], batch: SampleBatch) -> torch.Tensor:
        """Returns the ids that the model has, on the device."""
        return batch.on_device(np.array([each for each in token_ids if 0 <= each < self._vocab_size], np.int64))
