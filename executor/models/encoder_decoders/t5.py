"""T5 (arXiv:1910.10683), FLAN-T5 (2210.11416), mT5 (2010.11934), UMT5 (2304.09151) and LongT5 (2112.07916)."""

from collections.abc import Callable
from dataclasses import replace

import torch

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.cross import CrossAttention
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import NormStyle
from quire.executor.models.decoder import FeedForward, attention_shape, layer_places, size_of, vocabulary_ends
from quire.executor.models.encoder_decoders.encoder_decoder import (
    EncoderDecoder,
    PreNormCrossLayer,
    cross_place,
    encoder_context,
    encoder_spec,
)
from quire.executor.models.encoders.encoder import relative_bias
from quire.executor.models.encoders.t5 import (
    LongT5EncoderModel,
    T5EncoderModel,
    UMT5EncoderModel,
    feed_forward,
    plain_or_gated,
)
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import AttentionForm

_PIECES = {
    "attention_norm": Piece("layer.0.layer_norm"),
    "self_attn.q_proj": Piece("layer.0.SelfAttention.q"),
    "self_attn.k_proj": Piece("layer.0.SelfAttention.k"),
    "self_attn.v_proj": Piece("layer.0.SelfAttention.v"),
    "self_attn.o_proj": Piece("layer.0.SelfAttention.o"),
    "distances": Piece("layer.0.SelfAttention.relative_attention_bias"),
    "cross_norm": Piece("layer.1.layer_norm"),
    "cross_attn.q_proj": Piece("layer.1.EncDecAttention.q"),
    "cross_attn.k_proj": Piece("layer.1.EncDecAttention.k"),
    "cross_attn.v_proj": Piece("layer.1.EncDecAttention.v"),
    "cross_attn.o_proj": Piece("layer.1.EncDecAttention.o"),
    "mlp_norm": Piece("layer.2.layer_norm"),
}
_PIECES_OF_MLP = {"mlp.down_proj": Piece("layer.2.DenseReluDense.wo")}
_PLAIN = {"mlp.up_proj": Piece("layer.2.DenseReluDense.wi")}
_GATED = {
    "mlp.gate_proj": Piece("layer.2.DenseReluDense.wi_0"),
    "mlp.up_proj": Piece("layer.2.DenseReluDense.wi_1"),
}
_ENDS = {"model.embed_tokens": "shared", "model.norm": "decoder.final_layer_norm"}


class T5ForConditionalGeneration(EncoderDecoder):
    """Norms before blocks, no biases, unscaled scores; biases by distance in self-attention, those of the first layer
    for all.
    """

    SIZES: tuple[str, ...] = ("d_ff",)
    ENCODER: type[T5EncoderModel] = T5EncoderModel
    may_scale_outputs = True

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        weights = RearrangedWeights(
            context.weights, _PIECES | self.mlp_pieces(spec), layer="decoder.block.{}", ends=_ENDS
        )
        decoder = replace(context, weights=weights)
        style = NormStyle(config.get("layer_norm_epsilon", 1e-6))
        is_tied = config.get("tie_word_embeddings") is not False
        scales_outputs = self.may_scale_outputs and config.get("scale_decoder_outputs", is_tied)
        embed, head = vocabulary_ends(spec, decoder, is_tied=True, logit_scale=size**-0.5 if scales_outputs else 1.0)
        form_of, shape = self._forms(spec, decoder), attention_shape(spec)

        def layer(place: LayerPlace) -> PreNormCrossLayer:
            name = place.name
            return PreNormCrossLayer(
                style.layer(decoder, f"{name}.attention_norm", size),
                Attention(decoder, place, shape, None, form=form_of(place.index)),
                style.layer(decoder, f"{name}.cross_norm", size),
                CrossAttention(decoder, cross_place(place, spec), shape, form=AttentionForm(1.0)),
                style.layer(decoder, f"{name}.mlp_norm", size),
                self.mlp(spec, decoder, place.index),
            )

        own = encoder_spec(spec, size_of(spec, "num_layers"), spec.num_attention_heads)
        super().__init__(
            self.ENCODER(own, encoder_context(spec, context), embed),
            embed,
            [layer(place) for place in layer_places(spec, decoder)],
            style.layer(decoder, "model.norm", size),
            head,
        )

    def mlp_pieces(self, spec: ModelSpec) -> dict[str, Piece]:
        """Returns the places of the tensors of the decoder's feed-forward blocks."""
        return _PIECES_OF_MLP | (_GATED if feed_forward(spec)[0] else _PLAIN)

    def mlp(self, spec: ModelSpec, context: ModelContext, index: int) -> FeedForward:
        """Builds the feed-forward block of a layer of the decoder."""
        return plain_or_gated(spec, context, f"model.layers.{index}.mlp")

    def _forms(self, spec: ModelSpec, context: ModelContext) -> Callable[[int], AttentionForm]:
        """Returns what makes the form of a layer's self-attention."""
        count = spec.hf_config.get("relative_attention_num_buckets", 32)
        reach = spec.hf_config.get("relative_attention_max_distance", 128)

        def form(index: int) -> AttentionForm:
            name = f"model.layers.{index}.distances.weight"
            table = context.read(name, (count, spec.num_attention_heads), dtype=torch.float32)
            biases = relative_bias(table, context.max_model_len, reach, is_causal=True)
            return AttentionForm(1.0, distance_bias=biases)

        shared = form(0) if self.ENCODER.has_shared_distances else None
        return form if shared is None else lambda index: shared


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    """Outputs are not scaled before the head, though checkpoints may share its weight with the embedding."""

    may_scale_outputs = False


class UMT5ForConditionalGeneration(T5ForConditionalGeneration):
    """Each layer has biases by distance of its own."""

    ENCODER = UMT5EncoderModel


class LongT5ForConditionalGeneration(T5ForConditionalGeneration):
    """The encoder sees windows."""

    ENCODER = LongT5EncoderModel
