"""The segments of prompts' tokens: of a text and the one that it is compared with."""

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot, StepPlan
from quire.executor.transfers import to_device


class TokenTypes:
    """Holds the segments of requests that have several, by slot, on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._types: dict[int, np.ndarray] = {}  # [num_prompt_tokens] int64

    @property
    def pending(self) -> bool:
        """True if a request in a slot has segments."""
        return bool(self._types)

    def admit(self, request: NewSlot) -> None:
        """Adds the segments of a request that enters a slot."""
        self._types.pop(request.slot, None)
        if request.token_type_ids is not None:
            self._types[request.slot] = np.array(request.token_type_ids, np.int64)

    def release(self, slots: list[int]) -> None:
        """Drops the segments of these slots."""
        if self._types:
            for slot in slots:
                self._types.pop(slot, None)

    def rows(self, plan: StepPlan) -> torch.Tensor | None:
        """Returns the segments [num_tokens] int64 of the tokens that `plan` computes; None: all are of the first.

        Output tokens, and requests without segments, have the first.
        """
        if not any(slot in self._types for slot in plan.slots):
            return None
        parts = []
        for slot, start, count in zip(plan.slots, plan.num_computed, plan.num_scheduled, strict=True):
            known = self._types.get(slot, np.empty(0, np.int64))[start : start + count]
            parts.append(np.pad(known, (0, count - len(known))))
        return to_device(np.concatenate(parts), self._device)
