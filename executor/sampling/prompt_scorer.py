"""Log-probabilities of prompts: each token's, given those before it, while the prompt is computed."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from quire.core.config.model import LogprobsMode
from quire.core.wire.protocol import NewSlot, PromptLogprobs, StepPlan, TokenLogprobs
from quire.executor.sampling.logprobs import ALL, scores, token_logprobs
from quire.executor.step.request_table import RequestTable

_MAX_LOGITS = 2**23
"""Logits at once; a prompt's are computed in slices of this size, because all of them may not fit in memory."""


class PromptScorer:
    """Keeps which slots hold a prompt to be scored. Nothing changes logits here, so raw and processed are the same."""

    def __init__(self, vocab_size: int, mode: LogprobsMode) -> None:
        self._vocab_size = vocab_size
        self._mode = mode
        self._num_top: dict[int, int] = {}  # by slot

    @property
    def pending(self) -> bool:
        """Whether some slot's prompt is not scored yet."""
        return bool(self._num_top)

    def admit(self, request: NewSlot) -> None:
        """A request that comes with output has had its prompt scored in an earlier life."""
        wanted = request.sampling.prompt_logprobs
        self._num_top.pop(request.slot, None)
        if wanted is not None and len(request.token_ids) == request.num_prompt_tokens:
            self._num_top[request.slot] = self._vocab_size if wanted == ALL else min(wanted, self._vocab_size)

    def release(self, slots: list[int]) -> None:
        """These slots' requests are gone: before their prompts were scored, perhaps."""
        if self._num_top:
            for slot in slots:
                self._num_top.pop(slot, None)

    def score(
        self,
        plan: StepPlan,
        hidden: torch.Tensor,
        table: RequestTable,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[tuple[int, PromptLogprobs]]:
        """(slot, scores) for each row of the step that computed a part of such a prompt; waits for the device.

        Args:
            hidden: [num_tokens, hidden]; the model's output for all tokens of the step, row after row.
            compute_logits: hidden states to logits [..., vocab_size].
        """
        results = []
        first = 0
        for slot, start, count in zip(plan.slots, plan.num_computed, plan.num_scheduled, strict=True):
            if slot in self._num_top:
                last = int(table.num_prompt_tokens[slot]) - 1  # this token has no successor in the prompt
                end = min(start + count, last)
                if end > start:
                    targets = table.token_ids[slot, start + 1 : end + 1].long()
                    part = hidden[first : first + end - start]
                    positions = [
                        position
                        for logits, chunk in self._slices(part, targets, compute_logits)
                        for position in self._positions(logits, chunk, self._num_top[slot])
                    ]
                    results.append((slot, PromptLogprobs(start + 1, positions)))
                if start + count > last:
                    del self._num_top[slot]
            first += count
        return results

    def _slices(
        self, hidden: torch.Tensor, targets: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = max(1, _MAX_LOGITS // self._vocab_size)
        for part, chunk in zip(hidden.split(size), targets.split(size), strict=True):
            yield compute_logits(part).float(), chunk

    def _positions(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
        values = scores(logits, self._mode)
        own_ids = targets.unsqueeze(1)
        own = values.gather(1, own_ids)
        nth_likeliest = (values > own).sum(-1) + 1
        top, top_ids = values.topk(num_top, dim=-1)
        num_rows = len(targets)
        return token_logprobs(
            torch.cat([own_ids, top_ids], 1),
            torch.cat([own, top], 1),
            nth_likeliest,
            np.full(num_rows, num_top),
            np.ones(num_rows, bool),
        )
