"""The two ends of a model, split over ranks by token id: embedding and language-model head."""

import copy
import functools
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.adapted import base_layers
from quire.executor.layers.adapters import BaseLayer, LayerAdapters
from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization import sharding
from quire.executor.weights.quantization.online import Online
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import MissingTensorError, Shard
from quire.ops.backend import Backend
from quire.ops.linear import LinearWeight
from quire.ops.quantized import dequantize


class RowLookup(Protocol):
    """A weight [rows, size] for lookups by an embedding."""

    def take(self, index: Tensor, scale: float) -> Tensor:
        """Looks up the rows at `index` [n] int64, times `scale`: [n, size], in the model's dtype."""
        ...


@dataclass(frozen=True)
class PlainLookup:
    """RowLookup of a tensor in the model's dtype."""

    ops: Backend
    weight: Tensor

    def take(self, index: Tensor, scale: float) -> Tensor:
        return self.ops.take_rows(self.weight, index, scale)


@dataclass(frozen=True)
class PackedLookup:
    """RowLookup of a weight that the backend packed for products."""

    ops: Backend
    packed: Any
    dtype: torch.dtype

    def take(self, index: Tensor, scale: float) -> Tensor:
        return self.ops.take_packed_rows(self.packed, index, self.dtype, scale)


_KINDS = ("weight", "qweight", "weight_packed", "W_q")
"""The names of a layer's main tensor in the formats of weights."""


def stored_ends(context: ModelContext, embedding: str, head: str) -> tuple[str, str]:
    """Returns the layers from which a tied `embedding` and `head` are read.

    If the checkpoint has one of them, both share it. Two that differ are both read, as in Transformers: config.json is
    wrong in that case, for example after further training of the head.
    """
    if not _is_stored(context, head):
        return embedding, embedding
    if not _is_stored(context, embedding):
        return head, head
    are_same = context.weights.are_same(f"{embedding}.weight", f"{head}.weight")
    return embedding, embedding if are_same else head


def untied(context: ModelContext, embedding: str, head: str, error: MissingTensorError) -> MissingTensorError:
    """Adds a remedy to `error`, if the checkpoint has only one of two layers that are not tied."""
    if _is_stored(context, embedding) == _is_stored(context, head):
        return error
    return with_remedy(error)


def with_remedy(error: MissingTensorError) -> MissingTensorError:
    """Adds a remedy to `error` about an embedding or a head that the checkpoint lacks, while it has the other."""
    return MissingTensorError(
        f"{error} config.json says that embedding and head do not share a weight. If they do, start with "
        "--hf-overrides '{\"tie_word_embeddings\": true}'."
    )


def _is_stored(context: ModelContext, layer: str) -> bool:
    return any(context.find(f"{layer}.{kind}") is not None for kind in _KINDS)


_TIED_HEAD = "lm_head"
"""The name by which adapters change a head whose weight is the embedding's."""


_TIED_TABLE = "embed_tokens"
"""The name by which adapters change an embedding whose weight is stored as the head's."""


class VocabularyWeight:
    """A rank's rows of a [vocab_size, hidden] weight: of an embedding, of a head, or shared by the two.

    A shared weight has the head's form, and the embedding looks up rows in it. An embedding alone is as in the
    checkpoint. Every rank holds equally many rows. If the number of ranks does not divide the vocabulary, the last
    ranks hold rows of zeros past its end.

    Attributes:
        num_rows: of a rank.
        start: the first one's token id.
    """

    def __init__(
        self, context: ModelContext, name: str, vocab_size: int, hidden_size: int, *, bias: str | None = None,
        is_shared: bool = False,
    ) -> None:  # fmt: skip
        """Takes the name of the head's `bias`, if it has one."""
        self.vocab_size = vocab_size
        self.num_rows = rows = -(-vocab_size // context.group.size)
        self.start = min(context.group.rank * rows, vocab_size)
        self._context = context
        self._hidden_size = hidden_size
        self._bias = bias
        self._is_shared = is_shared
        shard = Shard(0, self.start, min(self.start + rows, vocab_size))
        self._part = LinearPart(name.removesuffix(".weight"), vocab_size, shard)

    @functools.cached_property
    def rows(self) -> RowLookup:
        """The weight for an embedding; read when it is first used."""
        context = self._context
        weight = self._shared[1] if self._is_shared else context.packing.rows(self._read)
        if isinstance(weight, Tensor):
            return PlainLookup(context.ops, weight)
        return PackedLookup(context.ops, weight, context.dtype)

    def for_product(self) -> Any:
        """Returns the packed weight and bias for the head's product."""
        return self._shared[0] if self._is_shared else self._context.packing.linear(self._read_head)

    def head_adapters(self) -> LayerAdapters | None:
        """Returns the place of adapters for the head's product; None: there are none."""
        context = self._context
        if context.adapters is None:
            return None
        [base] = base_layers(context, [self._part], self._hidden_size, bias=False)
        base = base._replace(
            part=self._part._replace(name=_TIED_HEAD) if self._is_shared else self._part,
            has_bias=self._bias is not None,
            locate=(lambda: None) if self._is_shared else base.locate,
            read_weight=self._read_served,
            read_stored=self._read_whole,
            read_bias=self._read_whole_bias,
            shares=self._table_name if self._is_shared else None,
        )
        return context.adapters.of_columns([base], [self.num_rows])

    def table_adapters(self, scale: float) -> LayerAdapters | None:
        """Returns the place of adapters for an embedding, whose rows are multiplied by `scale`; None: there is none."""
        context, size = self._context, self._hidden_size
        if context.adapters is None or self._part.shard.start == self._part.shard.stop:
            return None
        base = BaseLayer(
            LinearPart(self._table_name, size, Shard(0, 0, size)),
            self.vocab_size,
            has_bias=False,
            locate=lambda: None,
            read_weight=lambda: (self._read_served() if self._is_shared else self._read_whole()).T,
            read_stored=lambda: self._read_whole().T,
            read_bias=lambda: None,
            is_table=True,
            scale=scale,
        )
        return context.adapters.of_rows(base, [self._part.shard], has_bias=False)

    @property
    def _table_name(self) -> str:
        """The name by which adapters change the embedding."""
        name = self._part.name
        return _TIED_TABLE if self._is_shared and name.endswith(_TIED_HEAD) else name

    def _read_whole(self) -> Tensor:
        whole = self._part._replace(shard=Shard(0, 0, self.vocab_size))
        return self._context.read_dequantized(whole, self._hidden_size)

    def _read_served(self) -> Tensor:
        """Reads the numbers of the head's product, which differ from the file's where heads are quantized at load."""
        stored = self._read_whole()
        if not isinstance(self._context.scheme, Online):
            return stored
        return dequantize(self._context.scheme.for_head(stored, self._part))

    def _read_whole_bias(self) -> Tensor | None:
        return None if self._bias is None else self._context.read(self._bias, (self.vocab_size,))

    @functools.cached_property
    def _shared(self) -> tuple[Any, Any]:
        return self._context.packing.shared(self._read_head)

    def _read(self) -> LinearWeight:
        rows = self._context.scheme.read_rows(self._context, self._part, self._hidden_size)
        return sharding.pad_outputs(rows, self.num_rows)

    def _read_head(self) -> tuple[LinearWeight, Tensor | None]:
        return self._context.scheme.for_head(self._read(), self._part), self._read_bias()

    def _read_bias(self) -> Tensor | None:
        """Reads the bias of the rank's rows; zeros where a row is past the end."""
        if self._bias is None:
            return None
        bias = self._context.read(self._bias, (self.vocab_size,), self._part.shard)
        return F.pad(bias, (0, self.num_rows - len(bias)))


class Embedding(Protocol):
    """Maps token ids, or features, and positions to hidden states."""

    def __call__(self, content: Tensor, step: StepContext, /) -> Tensor: ...


class Head(Protocol):
    """Maps hidden states to logits."""

    def __call__(self, hidden: Tensor, /) -> Tensor: ...


class AbsentEmbedding:
    """Replaces the embedding in all pipeline stages except the first. It is never called."""

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        raise AssertionError("the first stage has the embedding")


class AbsentHead:
    """Replaces the head in all pipeline stages except the last. It is never called."""

    def __call__(self, hidden: Tensor) -> Tensor:
        raise AssertionError("the last stage has the head")


class VocabEmbedding:
    """Maps token ids [num_tokens] to [num_tokens, hidden], times `scale`, the same on every rank.

    The step's given rows replace these, unscaled.
    """

    def __init__(
        self, context: ModelContext, weight: VocabularyWeight, scale: float = 1.0, *, takes_adapters: bool = False
    ) -> None:
        self._group = context.group
        self._adapters = weight.table_adapters(scale) if takes_adapters else None
        self._rows = weight.rows
        self._num_rows = weight.num_rows
        self._start = weight.start
        self._scale = scale

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        embedded = self.rows_of(token_ids)
        if step.input_embeds is not None:
            embedded[step.input_embeds.places] = step.input_embeds.rows
        return embedded

    def rows_of(self, token_ids: Tensor) -> Tensor:
        """Looks up the tokens' own rows, without the step's given rows."""
        if self._group.size == 1:
            embedded = self._rows.take(token_ids, self._scale)
            return embedded if self._adapters is None else self._adapters.add_rows(token_ids, embedded)
        local_ids = token_ids - self._start
        is_elsewhere = (local_ids < 0) | (local_ids >= self._num_rows)
        local_ids = local_ids.masked_fill(is_elsewhere, 0)
        embedded = self._rows.take(local_ids, self._scale).masked_fill(is_elsewhere.unsqueeze(1), 0)
        if self._adapters is not None:
            embedded = self._adapters.add_rows(local_ids, embedded, is_elsewhere)
        return self._group.all_reduce(embedded)


class PositionedEmbedding:
    """Adds learned position embeddings to token embeddings: [num_tokens] → [num_tokens, hidden]."""

    def __init__(
        self, context: ModelContext, embed: Embedding, name: str, num_positions: int, size: int, *, first: int = 0
    ) -> None:
        """Takes the position embeddings from the weight `name`: `num_positions` rows, from row `first` on.

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

    def without_adapters(self) -> "PositionedEmbedding":
        """Returns one that shares the weights."""
        base = copy.copy(self)
        base._embed = without_adapters(self._embed)
        return base


def positioned_embedding(
    context: ModelContext, embed: Embedding, name: str, num_positions: int, size: int, *, first: int = 0
) -> Embedding:
    """Builds the `PositionedEmbedding` of `embed`; in later pipeline stages returns `embed`, which is never called."""
    if not context.is_first_stage:
        return embed
    return PositionedEmbedding(context, embed, name, num_positions, size, first=first)


class LanguageModelHead:
    """Maps [num_tokens, hidden] to logits [num_tokens, vocab_size], gathered from all ranks.

    Logits are multiplied by `scale`, then capped as in `AttentionForm.softcap`.
    """

    def __init__(
        self,
        context: ModelContext,
        weight: VocabularyWeight,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self._ops = context.ops
        self._group = context.group
        self._vocab_size = weight.vocab_size
        self._scale, self._softcap = scale, softcap
        self._is_shaped = scale != 1 or softcap is not None
        self._packed = weight.for_product()
        self._adapters = weight.head_adapters()

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._ops.linear(hidden, self._packed)
        if self._adapters is not None:
            logits = self._adapters.add(hidden, logits)
        if self._is_shaped:
            logits = self._ops.scale(logits, self._scale, self._softcap)
        logits = self._group.all_gather(logits, dim=-1)
        return logits[:, : self._vocab_size]


End = TypeVar("End")


def without_adapters(end: End) -> End:
    """Returns an embedding or a head that shares the weights of `end` and knows no adapters of requests.

    It is for layers that draft: a pass of theirs has other tokens than the step.
    """
    if isinstance(end, PositionedEmbedding):
        return cast(End, end.without_adapters())
    if not isinstance(end, VocabEmbedding | LanguageModelHead):
        return end
    base = copy.copy(end)
    base._adapters = None
    return base
