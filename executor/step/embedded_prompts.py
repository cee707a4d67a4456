"""Prompts that are, or begin with, given embeddings: holds these rows, by slot, until they have been computed."""

import torch

from quire.core.wire.protocol import NewSlot, PromptEmbeds, StepPlan
from quire.executor.models.base import InputEmbeds


class EmbeddedPrompts:
    """Holds rows as received, on the host. A step copies only its own rows to the device, so no memory is planned.

    Args:
        hidden_size: columns of a row.
        dtype: of the model, which rows are converted to.
        device: where the model runs.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._prompts: dict[int, tuple[PromptEmbeds, int]] = {}  # by slot; with the number of rows

    @property
    def pending(self) -> bool:
        """True if the rows of some slot are not computed yet."""
        return bool(self._prompts)

    def admit(self, request: NewSlot) -> None:
        """Adds the rows of a request that enters a slot."""
        self._prompts.pop(request.slot, None)
        if request.prompt_embeds is not None:
            self._prompts[request.slot] = request.prompt_embeds, request.prompt_embeds.num_rows

    def release(self, slots: list[int]) -> None:
        """Drops the requests in these slots, whose prompts may not be computed yet."""
        if self._prompts:
            for slot in slots:
                self._prompts.pop(slot, None)

    def rows(self, plan: StepPlan) -> InputEmbeds | None:
        """Returns rows of the tokens that `plan` computes, if any, and drops those that are all computed."""
        places, parts = [], []
        first = 0
        for slot, start, count in zip(plan.slots, plan.num_computed, plan.num_scheduled, strict=True):
            if slot in self._prompts:
                embeds, length = self._prompts[slot]
                end = min(start + count, length)
                if end > start:
                    places.append(torch.arange(first, first + end - start))
                    parts.append(self._part(embeds, start, end))
                if start + count >= length:
                    del self._prompts[slot]
            first += count
        if not parts:
            return None
        return InputEmbeds(torch.cat(places).to(self._device), torch.cat(parts).to(self._device))

    def _part(self, embeds: PromptEmbeds, start: int, end: int) -> torch.Tensor:
        """Returns rows `start` to `end` as [end - start, hidden], on the host."""
        dtype = getattr(torch, embeds.dtype)
        width = self._hidden_size * dtype.itemsize
        data = bytearray(memoryview(embeds.rows)[start * width : end * width])  # torch needs writable bytes
        return torch.frombuffer(data, dtype=dtype).view(end - start, self._hidden_size).to(self._dtype)
