"""Attention of a decoder to its own tokens and to what an encoder has read, in one softmax."""

from typing import Any

from torch import Tensor

from quire.executor.layers.attention.grouped_query import Attention, AttentionShape, LayerPlace
from quire.executor.layers.attention.layer_kv import LayerKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext, Wanted
from quire.ops.backend import NewHeads


class MergedAttention(Attention):
    """Self-attention whose tokens also see all that the encoder has read. One projection makes the keys and values of
    both; only those of the decoder are rotated.

    Attributes:
        cross: the encoder's keys and values.
    """

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        cross_place: LayerPlace,
        shape: AttentionShape,
        rotary: RotaryEmbedding | None,
        **options: Any,
    ) -> None:
        """Takes the layer's place among caches, once for the decoder's tokens and once for the encoder's.

        `options` are those of `Attention`. A window of its `form` counts for the decoder's tokens alone.
        """
        super().__init__(context, place, shape, rotary, **options)
        self._cross_place = cross_place
        self._cross_form = self._form._replace(window=None)
        self.cross = EncoderKeys(self, LayerKV(self.kv.num_kv_heads, self.kv.head_dim, is_cross=True))
        self.activation_size += 2 * self._num_heads * self._head_dim

    def store(self, encoded: Tensor, step: StepContext) -> None:
        """Stores keys and values of the encoder's output, `encoded` [num_tokens, hidden]."""
        pages, group = step.caches[self._cross_place.number]
        heads = self._project(encoded)[:, : self._qkv_size].unflatten(1, (-1, self._head_dim))
        unrotated = NewHeads(
            heads, self._no_rotation, self._no_rotation, pages, step.encoder_slots[group], norm=self._qk_norm,
            scales=self._cache_scales,
        )  # fmt: skip
        self._ops.rotate_and_store(unrotated)

    def _attend(self, q: Tensor, step: StepContext, wanted: Wanted | None) -> Tensor:
        reads, parts = (wanted or step).attention, []
        for place, form in ((self._place, self._form), (self._cross_place, self._cross_form)):
            pages, group = step.caches[place.number]
            parts.append(self._ops.partial_attention(q, pages, reads[group], form))
        return self._ops.merge_attention(parts)


class EncoderKeys:
    """The encoder's side of a `MergedAttention`.

    Attributes:
        kv: the keys and values that the layer caches.
        activation_size: 0; the layer's attention counts them.
    """

    activation_size = 0

    def __init__(self, attention: MergedAttention, kv: LayerKV) -> None:
        self.kv = kv
        self._attention = attention

    def store(self, encoded: Tensor, step: StepContext) -> None:
        """Stores keys and values of the encoder's output, `encoded` [num_tokens, hidden]."""
        self._attention.store(encoded, step)
