"""The parts that models with an encoder and a decoder share: layers of the decoder, embeddings, and the model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from msgspec import structs
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.cross import CrossAttention
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.layer_kv import LayerKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import Norm
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding, Head
from quire.executor.models.decoder import Decoder, DecoderLayer, FeedForward, SelfAttention
from quire.executor.models.encoders.encoder import Encoder
from quire.ops.backend import Backend


class EncoderReader(Protocol):
    """A layer's attention to what the encoder has read: a `CrossAttention`, or a part of a `MergedAttention`."""

    activation_size: int

    @property
    def kv(self) -> LayerKV:
        """The keys and values that the layer caches of the encoder's output."""
        ...

    def store(self, encoded: Tensor, step: StepContext) -> None:
        """Stores these of `encoded` [num_tokens, encoder_size]."""
        ...


class CrossLayer(DecoderLayer, Protocol):
    """A layer of a decoder that attends to an encoder."""

    @property
    def cross(self) -> EncoderReader:
        """The layer's attention to the encoder."""
        ...


class PreNormCrossLayer:
    """Computes `x + attention(norm(x))`, `x + cross(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self,
        attention_norm: Norm,
        attention: SelfAttention,
        cross_norm: Norm,
        cross: CrossAttention,
        mlp_norm: Norm,
        mlp: FeedForward,
    ) -> None:
        self.attention = attention
        self.cross = cross
        self.mlp = mlp
        self._attention_norm = attention_norm
        self._cross_norm = cross_norm
        self._mlp_norm = mlp_norm

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        x, residual = self._attention_norm.add(x, residual)
        x = self.attention(x, step)
        x, residual = self._cross_norm.add(x, self.attention.outputs_of(residual, step))
        x, residual = self._mlp_norm.add(self.cross(x, step), residual)
        return self.mlp(x), residual


class PostNormCrossLayer:
    """Computes `n = norm(x + attention(x))`, `m = norm(n + cross(n))`, then `m + mlp(m)`, whose norm the next layer
    begins with.
    """

    def __init__(
        self,
        before: Norm | None,
        attention: SelfAttention,
        attention_norm: Norm,
        cross: CrossAttention,
        cross_norm: Norm,
        mlp: FeedForward,
    ) -> None:
        """Takes as `before` the previous layer's last norm; None in the first."""
        self.attention = attention
        self.cross = cross
        self.mlp = mlp
        self._before = before
        self._attention_norm = attention_norm
        self._cross_norm = cross_norm

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        if self._before is not None:
            x = self._before.add(x, residual)[0]
        x = self._attention_norm.add(self.attention(x, step), self.attention.outputs_of(x, step))[0]
        x = self._cross_norm.add(self.cross(x, step), x)[0]
        return self.mlp(x), x


class AddedPositions:
    """Adds rows of positions to embeddings of tokens, and normalizes the sum if there is a norm."""

    def __init__(self, ops: Backend, embed: Embedding, rows: Tensor, norm: Norm | None = None) -> None:
        """Takes `rows` [num_positions, hidden], from that of the first token on."""
        self._ops = ops
        self._embed = embed
        self._rows = rows
        self._norm = norm

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        x = self._ops.add(self._ops.take_rows(self._rows, step.positions), self._embed(token_ids, step))
        return x if self._norm is None else self._norm(x)


class EncoderDecoder(Decoder):
    """Implements `quire.executor.models.base.EncoderDecoder`. Caches of attention to the encoder follow all others."""

    def __init__(
        self, encoder: Encoder, embed: Embedding, layers: Sequence[CrossLayer], norm: Norm, head: Head
    ) -> None:
        super().__init__(embed, layers, norm, head)
        self._encoder = encoder
        self._crosses = [layer.cross for layer in layers]
        self.kv_layers = [*self.kv_layers, *(cross.kv for cross in self._crosses)]
        widest = max(cross.activation_size for cross in self._crosses)
        self.activation_size = max(self.activation_size + widest, encoder.activation_size)

    def encode(self, content: Tensor, step: StepContext) -> None:
        encoded = self._encoder.forward(content, step)
        for cross in self._crosses:
            cross.store(encoded, step)


def cross_place(place: LayerPlace, spec: ModelSpec) -> LayerPlace:
    """Returns the place of a layer's attention to the encoder; `place` is that of its self-attention."""
    return replace(place, number=spec.num_layers + place.number)


def encoder_context(spec: ModelSpec, context: ModelContext) -> ModelContext:
    """Returns the context of the encoder's layers: its inputs have a limit of their own."""
    assert spec.encoder is not None, "the checkpoint's facts tell of no encoder"
    return replace(context, max_model_len=spec.encoder.max_rows)


def encoder_spec(spec: ModelSpec, num_layers: int, num_heads: int) -> ModelSpec:
    """Returns the facts of the encoder, with those that it shares with the decoder."""
    assert spec.encoder is not None, "the checkpoint's facts tell of no encoder"
    return structs.replace(
        spec,
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=num_heads,
        vocab_size=spec.encoder.vocab_size,
    )
