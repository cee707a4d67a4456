"""Attention of an encoder of Transformers in both directions: the function that its modules call."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.executor.layers.attention.grouped_query import own_form
from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import StepContext
from quire.executor.models.transformers.attention import form_of
from quire.executor.models.transformers.probe import AttentionCall


class AttentionOfSequences:
    """Identifies layers by the order of their calls in a forward pass, as `PagedAttention` does."""

    def __init__(self, context: ModelContext, calls: list[AttentionCall]) -> None:
        """Takes the `calls` of a dry run on this rank.

        Raises:
            ModelLoadError: attention of a form that the operations lack.
        """
        self._context = context
        self._forms = [form_of(call, is_encoder=True) for call in calls]
        self._step: StepContext | None = None
        self._next = 0

    @contextlib.contextmanager
    def in_step(self, step: StepContext) -> Iterator[None]:
        """Makes the calls those of a forward pass over the sequences of `step`."""
        self._step, self._next = step, 0
        try:
            yield
        finally:
            self._step = None

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attends from `query` [1, heads, num_tokens, size], keys and values alike, to [1, num_tokens, heads, size of
        values].

        Outside of a step, each of n sequences [n, heads, 1, size] has one token, which sees itself.
        """
        if self._step is None:
            return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None
        index, self._next = self._next, self._next + 1
        form = self._forms[index]
        sinks = arguments.get("s_aux")
        if sinks is not None and form.sinks is None:
            form = form._replace(sinks=sinks.flatten().to(torch.float32))
            if len(sinks.flatten()) != query.shape[1]:
                form = own_form(self._context, form)
            self._forms[index] = form
        size = max(query.shape[3], value.shape[3])
        parts = [F.pad(x[0].transpose(0, 1), (0, size - x.shape[3])) for x in (query.to(value.dtype), key, value)]
        out = self._context.ops.sequence_attention(
            torch.cat(parts, dim=1), key.shape[1], self._step.sequences, form
        )  # fmt: skip
        return out[..., : value.shape[3]].unsqueeze(0), None
