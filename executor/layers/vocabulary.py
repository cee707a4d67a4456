"""The two ends of a model, split over ranks by token id: embedding and language-model head."""

import functools
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantisation.scheme import Part
from quire.executor.weights.readers import Shard, Stored
from quire.ops.backend import LinearWeight


class VocabularyWeight:
    """A rank's rows of a [vocab_size, hidden] weight; read once when embedding and head share it.

    Every rank holds equally many rows. If the number of ranks does not divide the vocabulary, the last ranks hold rows
    of zeros past its end.
    """

    def __init__(self, context: ModelContext, name: str, vocab_size: int, hidden_size: int) -> None:
        self.vocab_size = vocab_size
        self._context = context
        self._name = name
        self._hidden_size = hidden_size
        self._num_rows = rows = -(-vocab_size // context.group.size)
        self.start = min(context.group.rank * rows, vocab_size)
        self._stop = min(self.start + rows, vocab_size)

    @functools.cached_property
    def rows(self) -> Tensor:
        """[rows of a rank, hidden], in the model's dtype; read when it is first asked for."""
        shard = Shard(0, self.start, self._stop)
        weight = _read_rows(self._context, self._name, self.vocab_size, self._hidden_size, shard)
        missing = self._num_rows - len(weight)
        return F.pad(weight, (0, 0, 0, missing)) if missing else weight

    def for_product(self, context: ModelContext) -> LinearWeight:
        """The rows as the head multiplies by them."""
        part = Part(self._name.removesuffix(".weight"), self.vocab_size, Shard(0, self.start, self._stop))
        return context.scheme.head_weight(context, part, self.rows.shape[1], self.rows)

    def read_bias(self, context: ModelContext, name: str) -> Tensor:
        """The numbers of `name` [vocab_size] that belong to the rank's rows; zeros where a row is past the end."""
        bias = context.read(name, (self.vocab_size,), Shard(0, self.start, self._stop))
        return F.pad(bias, (0, len(self.rows) - len(bias)))


def _read_rows(context: ModelContext, name: str, vocab_size: int, hidden_size: int, shard: Shard) -> Tensor:
    """Rows in the model's dtype, also of a weight that the checkpoint has quantised."""
    plain = Stored((vocab_size, hidden_size), context.dtype)
    found = context.find(name, plain)
    if found is not None and found.dtype.itemsize > 1:
        return context.read(name, plain.shape, shard)
    part = Part(name.removesuffix(".weight"), vocab_size, shard)
    return context.read_numbers(part, hidden_size)


class Embedding(Protocol):
    """What makes a hidden state of a token and its place."""

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """See `VocabEmbedding.__call__`."""
        ...


class Head(Protocol):
    """What makes logits of hidden states."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """See `LanguageModelHead`."""
        ...


class ElsewhereEmbedding:
    """Stands for the embedding in all pipeline stages but the first. Nothing calls it."""

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        raise AssertionError("the first stage has the embedding")


class ElsewhereHead:
    """Stands for the head in all pipeline stages but the last. Nothing calls it."""

    def __call__(self, hidden: Tensor) -> Tensor:
        raise AssertionError("the last stage has the head")


class VocabEmbedding:
    """Token ids [num_tokens] → [num_tokens, hidden], times `scale`, the same on every rank.

    The step's given rows replace these, unscaled.
    """

    def __init__(self, context: ModelContext, weight: VocabularyWeight, scale: float = 1.0) -> None:
        self._ops = context.ops
        self._group = context.group
        self._rows = weight.rows
        self._start = weight.start
        self._scale = scale

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        embedded = self.rows_of(token_ids)
        if step.given is not None:
            embedded[step.given.places] = step.given.rows
        return embedded

    def rows_of(self, token_ids: Tensor) -> Tensor:
        """The tokens' own rows, whatever the step gives."""
        if self._group.size == 1:
            return self._ops.take_rows(self._rows, token_ids, self._scale)
        local_ids = token_ids - self._start
        is_elsewhere = (local_ids < 0) | (local_ids >= len(self._rows))
        embedded = self._ops.take_rows(self._rows, local_ids.masked_fill(is_elsewhere, 0), self._scale)
        return self._group.all_reduce(embedded.masked_fill(is_elsewhere.unsqueeze(1), 0))


class PositionedEmbedding:
    """Token embeddings plus learned position embeddings: [num_tokens] → [num_tokens, hidden]."""

    def __init__(
        self, context: ModelContext, embed: Embedding, name: str, num_positions: int, size: int, *, first: int = 0
    ) -> None:
        """Position 0 has row `first` of the weight called `name`, and `num_positions` rows follow from there.

        Raises:
            ModelLoadError: `max_model_len` exceeds the positions.
        """
        if context.max_model_len > num_positions:
            raise ModelLoadError(
                f"max_model_len {context.max_model_len} exceeds the model's {num_positions} learned positions; "
                f"serve with --max-model-len {num_positions} or less."
            )
        self._ops = context.ops
        self._embed = embed
        self._rows = context.read(name, (first + num_positions, size))[first:]

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        return self._ops.add(self._ops.take_rows(self._rows, step.positions), self._embed(token_ids, step))


def positioned_embedding(
    context: ModelContext, embed: Embedding, name: str, num_positions: int, size: int, *, first: int = 0
) -> Embedding:
    """The `PositionedEmbedding` of `embed`; in a later pipeline stage, `embed` itself, which nothing calls."""
    if not context.is_first_stage:
        return embed
    return PositionedEmbedding(context, embed, name, num_positions, size, first=first)


class LanguageModelHead:
    """[num_tokens, hidden] → logits [num_tokens, vocab_size], gathered from all ranks.

    Logits are multiplied by `scale`, then capped as `AttentionForm.softcap` says.
    """

    def __init__(
        self,
        context: ModelContext,
        weight: VocabularyWeight,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        bias: str | None = None,
    ) -> None:
        """`bias` is its name, if the layer has one."""
        self._ops = context.ops
        self._group = context.group
        self._vocab_size = weight.vocab_size
        self._scale, self._softcap = scale, softcap
        self._is_shaped = scale != 1 or softcap is not None
        self._packed = context.packing.linear(
            lambda: (weight.for_product(context), None if bias is None else weight.read_bias(context, bias))
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._ops.linear(hidden, self._packed)
        if self._is_shaped:
            logits = self._ops.scale(logits, self._scale, self._softcap)
        logits = self._group.all_gather(logits, dim=-1)
        return logits[:, : self._vocab_size]
