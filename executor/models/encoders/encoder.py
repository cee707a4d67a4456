"""The parts that encoders share: embedding, layers, the model, and the names of its tensors in checkpoints."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.adapters import LayerAdapters
from quire.executor.layers.attention.grouped_query import AttentionShape
from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.norm import Norm
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding, VocabEmbedding, VocabularyWeight
from quire.executor.models.decoder import FeedForward
from quire.executor.models.encoders.heads import WORDS, Heads
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import Backend


class TokenMixer(Protocol):
    """`SequenceAttention`, or another layer that mixes the tokens of a sequence."""

    activation_size: int

    def __call__(self, x: Tensor, step: StepContext) -> Tensor: ...


class EncoderLayer(Protocol):
    """One layer: [num_tokens, hidden] → [num_tokens, hidden]. It may write into its input."""

    activation_size: int

    def __call__(self, x: Tensor, step: StepContext) -> Tensor: ...


class PostNormLayer:
    """Computes `norm(x + attention(x))`, then `norm(x + mlp(x))`."""

    def __init__(self, attention: TokenMixer, attention_norm: Norm, mlp: FeedForward, mlp_norm: Norm) -> None:
        self.activation_size = attention.activation_size + mlp.activation_size
        self._attention = attention
        self._attention_norm = attention_norm
        self._mlp = mlp
        self._mlp_norm = mlp_norm

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        x = self._attention_norm.add(self._attention(x, step), x)[0]
        return self._mlp_norm.add(self._mlp(x), x)[0]


class PreNormLayer:
    """Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`. The first norm may be missing."""

    def __init__(
        self, ops: Backend, attention_norm: Norm | None, attention: TokenMixer, mlp_norm: Norm, mlp: FeedForward
    ) -> None:
        self.activation_size = attention.activation_size + mlp.activation_size
        self._ops = ops
        self._attention_norm = attention_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        normed = x if self._attention_norm is None else self._attention_norm(x)
        x = self._ops.add(self._attention(normed, step), x)
        return self._ops.add(self._mlp(self._mlp_norm(x)), x)


class EncoderEmbedding:
    """Sums embeddings of tokens, positions and segments, and normalizes: [num_tokens] → [num_tokens, hidden].

    Tables may be narrower than the hidden states; a projection before or after the norm then widens the sum.
    """

    def __init__(
        self,
        context: ModelContext,
        words: VocabularyWeight,
        *,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        norm: Norm | None = None,
        before_norm: ColumnLinear | None = None,
        after_norm: ColumnLinear | None = None,
        word_adapters: LayerAdapters | None = None,
        type_adapters: LayerAdapters | None = None,
    ) -> None:
        """Takes the rows of positions, from that of the first token on, and those of segments."""
        self._ops = context.ops
        self._words = VocabEmbedding(context, words)
        self._positions = positions
        self._types = types
        self._norm = norm
        self._before_norm = before_norm
        self._after_norm = after_norm
        self._word_adapters = word_adapters
        self._type_adapters = type_adapters

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        x = self._words(token_ids, step)
        if self._word_adapters is not None:
            x = self._word_adapters.add_rows(token_ids, x)
        if self._types is not None:  # apart from positions: the sum is the same whether any token has another segment
            types = torch.zeros_like(token_ids) if step.token_types is None else step.token_types
            x = self._ops.add(self._ops.take_rows(self._types, types), x)
            if self._type_adapters is not None:
                x = self._type_adapters.add_rows(types, x)
        if self._positions is not None:
            x = self._ops.add(self._ops.take_rows(self._positions, step.positions), x)
        if self._before_norm is not None:
            x = self._before_norm(x)
        if self._norm is not None:
            x = self._norm(x)
        return x if self._after_norm is None else self._after_norm(x)


class Encoder:
    """Embedding, layers, and a norm after all. Implements `quire.executor.models.base.Model`.

    Attributes:
        classify: maps pooled vectors, or hidden states of tokens, [n, hidden] float32 to logits [n, num_labels]. Only
            models with labels have it.
    """

    classify: Callable[[Tensor], Tensor]

    kv_layers: Sequence[AttentionKV] = ()
    state_layers: Sequence[LayerState] = ()
    num_layer_outputs = 0

    def __init__(
        self,
        embed: Embedding,
        layers: Sequence[EncoderLayer],
        heads: Heads,
        norm: Callable[[Tensor], Tensor] | None = None,
        *,
        activation_size: int | None = None,
    ) -> None:
        """Takes as `norm` what maps the last layer's output to hidden states; `activation_size` is that of layers which
        a subclass calls.
        """
        self._embed = embed
        self._layers = layers
        self._norm = norm
        self._vocabulary_head = heads.vocabulary
        if heads.labels is not None:
            self.classify = heads.labels
        self.activation_size = activation_size or max(layer.activation_size for layer in layers)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        x = self._embed(token_ids, step)
        for layer in self._layers:
            x = layer(x, step)
        return x if self._norm is None else self._norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores the vocabulary at each token, for checkpoints with such a head."""
        assert self._vocabulary_head is not None, "an encoder samples no tokens"
        return self._vocabulary_head(hidden)


def renamed(
    context: ModelContext,
    prefixes: Sequence[str],
    layer: str,
    pieces: Mapping[str, Piece],
    ends: Mapping[str, str],
) -> ModelContext:
    """Returns a context that finds the tensors of an encoder under their names in the checkpoint.

    `layer` and the values of `ends` are without the model's prefix, one of `prefixes`. Checkpoints of a model with a
    head have it, and those of the encoder alone lack it.
    """
    found = (f"{prefix}." for prefix in prefixes if context.find(f"{prefix}.{ends[WORDS]}.weight") is not None)
    own = next(found, "")
    names = {name: f"{own}{stored}" for name, stored in ends.items()}
    weights = RearrangedWeights(context.weights, pieces, layer=f"{own}{layer}", ends=names)
    return replace(context, weights=weights)


def encoder_shape(spec: ModelSpec) -> AttentionShape:
    """Returns the sizes of attention layers."""
    return AttentionShape(spec.hidden_size, spec.num_attention_heads, spec.num_kv_heads, spec.head_dim)


def position_rows(context: ModelContext, name: str, num_rows: int, size: int, *, first: int = 0) -> Tensor:
    """Reads the rows of a table of `num_rows` positions, from that of a sequence's first token on.

    Raises:
        ModelLoadError: sequences may be longer than the rest of the table.
    """
    if context.max_model_len > num_rows - first:
        raise ModelLoadError(
            f"max_model_len {context.max_model_len} exceeds the model's {num_rows - first} learned positions; "
            f"serve with --max-model-len {num_rows - first} or less."
        )
    return context.read(name, (num_rows, size))[first:]


def projection(context: ModelContext, name: str, in_features: int, out_features: int, *, bias: bool) -> ColumnLinear:
    """Builds a linear layer that every rank has whole."""
    return ColumnLinear(context, [whole(name, out_features)], in_features, bias=bias)


def relative_bias(table: Tensor, num_tokens: int, max_distance: int, *, is_causal: bool = False) -> Tensor:
    """Spreads biases of buckets of distances, `table` [num_buckets, num_heads], over the distances of a sequence.

    Returns `AttentionForm.distance_bias`. Half of the buckets are for keys after the query, and none if it `is_causal`.
    """
    count = table.shape[0] if is_causal else table.shape[0] // 2
    reach = min(max_distance, max(1, num_tokens - 1))
    distances = torch.arange(-reach, reach + 1)
    buckets = distance_buckets((-distances).clamp(min=0) if is_causal else distances.abs(), count, max_distance)
    if not is_causal:
        buckets = (distances > 0) * count + buckets
    return table.index_select(0, buckets.to(table.device)).t().contiguous()


def distance_buckets(distances: Tensor, count: int, max_distance: int) -> Tensor:
    """Maps `distances` [...] int64, at least 0, to `count` buckets.

    The first half of them has a distance each; the others grow with its logarithm, up to `max_distance`
    (arXiv:1910.10683).
    """
    near = count // 2
    share = (distances.clamp(min=1).float() / near).log() / math.log(max_distance / near)
    far = (near + (share * (count - near)).long()).clamp(max=count - 1)
    return torch.where(distances < near, distances, far)
