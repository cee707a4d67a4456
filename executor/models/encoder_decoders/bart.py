"""BART (arXiv:1910.13461) and its kin: mBART (2001.08210), M2M100 and NLLB (2010.11125, 2207.04672), Marian
(1804.00344), Pegasus (1912.08777), MVP (2206.12131), PLBART (2103.06333).

They differ in the places of norms, and in positions.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.cross import CrossAttention
from quire.executor.layers.attention.grouped_query import Attention, AttentionShape, LayerPlace
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.vocabulary import Embedding, VocabEmbedding, VocabularyWeight
from quire.executor.models.decoder import (
    SettingError,
    activation_of,
    attention_shape,
    layer_places,
    size_of,
    vocabulary_ends,
)
from quire.executor.models.encoder_decoders.encoder_decoder import (
    AddedPositions,
    CrossLayer,
    EncoderDecoder,
    PostNormCrossLayer,
    PreNormCrossLayer,
    cross_place,
    encoder_context,
    encoder_spec,
)
from quire.executor.models.encoder_decoders.positions import interleaved_sinusoids, spread_sinusoids
from quire.executor.models.encoders.encoder import (
    Encoder,
    EncoderLayer,
    PostNormLayer,
    PreNormLayer,
    encoder_shape,
    position_rows,
)
from quire.executor.models.encoders.heads import Heads
from quire.executor.weights.readers import Shard
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import AttentionForm

_PIECES = {
    "self_attn.o_proj": Piece("self_attn.out_proj"),
    "attention_norm": Piece("self_attn_layer_norm"),
    "cross_attn.q_proj": Piece("encoder_attn.q_proj"),
    "cross_attn.k_proj": Piece("encoder_attn.k_proj"),
    "cross_attn.v_proj": Piece("encoder_attn.v_proj"),
    "cross_attn.o_proj": Piece("encoder_attn.out_proj"),
    "cross_norm": Piece("encoder_attn_layer_norm"),
    "mlp.up_proj": Piece("fc1"),
    "mlp.down_proj": Piece("fc2"),
    "mlp_norm": Piece("final_layer_norm"),
}
_STYLE = NormStyle(1e-5, is_centred=True, has_bias=True)
_LOGIT_BIAS = "final_logits_bias"

SideName = Literal["encoder", "decoder"]


class FlatBias(RearrangedWeights):
    """Reads the bias of logits, which checkpoints store as a matrix of one row."""

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if name != "lm_head.bias":
            return super().read(name, shape, shard, dtype)
        part = None if shard is None else shard._replace(dim=1)
        return self._reader.read(_LOGIT_BIAS, (1, *shape), part, dtype)[0]


class BartForConditionalGeneration(EncoderDecoder):
    """Norms after blocks and after the embedding, learned positions, one table of tokens for both ends.

    Subclasses differ in the attributes.

    Attributes:
        SIZES: fields that config.json must have.
        BASE: the name of all but the head in checkpoints.
        HEAD: the name of the head.
        ENCODER_PIECES: names in the encoder's layers that differ from the decoder's.
        first_position: the row of the first token's position; those before it are unused.
        norms_first: norms are before blocks, and one is after all layers.
        norms_embedding: a norm is after the sum of tokens and positions.
        attention_biases: layers of attention have biases.
        heeds_scale: `scale_embedding` of config.json has an effect.
        encoder_size: the width of the encoder's output; None: the decoder's.
        weights_type: reads tensors that checkpoints store in another form.
    """

    SIZES: tuple[str, ...] = ("decoder_ffn_dim", "encoder_ffn_dim")
    BASE = "model"
    HEAD = "lm_head"
    ENCODER_PIECES: ClassVar[Mapping[str, Piece]] = {}
    first_position = 2
    norms_first = False
    norms_embedding = True
    attention_biases = True
    heeds_scale = True
    encoder_size: int | None = None
    weights_type: type[RearrangedWeights] = FlatBias

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        stem = _stem(context, self.BASE)
        config, size = spec.hf_config, spec.hidden_size
        scale = math.sqrt(size) if self.heeds_scale and config.get("scale_embedding") else 1.0
        decoder = self._renamed(context, f"{stem}decoder", _tokens(context, stem, "decoder"))
        has_bias = context.find(_LOGIT_BIAS) is not None
        is_tied = config.get("tie_word_embeddings", True)
        embed, head = vocabulary_ends(spec, decoder, is_tied=is_tied, scale=scale, head_bias=has_bias)
        tokens = _tokens(context, stem, "encoder")
        shared = embed if tokens == _tokens(context, stem, "decoder") else None
        own = self._renamed(encoder_context(spec, context), f"{stem}encoder", tokens, self.ENCODER_PIECES)
        encoder = self._encoder_of(spec, own, shared, scale)
        norms = [self._named_norm(decoder, f"model.layers.{index}.mlp_norm", size) for index in range(spec.num_layers)]
        layers: list[CrossLayer] = []
        for place in layer_places(spec, decoder):
            before = norms[place.index - 1] if place.index else None
            layers.append(self._layer(spec, decoder, place, before, norms[place.index]))
        last = self._named_norm(decoder, "last_norm", size) if self.norms_first else norms[-1]
        super().__init__(encoder, self._positioned(spec, decoder, embed, "decoder"), layers, last, head)

    def position_rows(self, spec: ModelSpec, context: ModelContext, side: SideName) -> Tensor:
        """Returns the rows of positions of a side [num_positions, hidden], from that of the first token on."""
        num_rows = size_of(spec, f"max_{side}_position_embeddings", "max_position_embeddings") + self.first_position
        return position_rows(context, "positions.weight", num_rows, spec.hidden_size, first=self.first_position)

    def encoder_attention(
        self, spec: ModelSpec, context: ModelContext, name: str, shape: AttentionShape, index: int
    ) -> SequenceAttention:
        """Builds the attention of the encoder's layer `index`."""
        form, bias = self.encoder_form(spec, shape.head_dim, index), self.attention_biases
        return SequenceAttention(context, name, shape, bias=bias, output_bias=bias, form=form)

    def encoder_form(self, spec: ModelSpec, head_dim: int, index: int) -> AttentionForm:
        """Returns the form of attention in a layer of the encoder."""
        return AttentionForm(head_dim**-0.5)

    def _positioned(self, spec: ModelSpec, context: ModelContext, embed: Embedding, side: SideName) -> AddedPositions:
        norm = self._named_norm(context, "embedding_norm", spec.hidden_size) if self.norms_embedding else None
        return AddedPositions(context.ops, embed, self.position_rows(spec, context, side), norm)

    def _encoder_of(self, spec: ModelSpec, context: ModelContext, embed: Embedding | None, scale: float) -> Encoder:
        """Builds the encoder; arguments are those of `_encoder_embedding`."""
        size = spec.hidden_size
        own = encoder_spec(spec, size_of(spec, "encoder_layers"), size_of(spec, "encoder_attention_heads"))
        own_head_dim = size // own.num_attention_heads
        inner, activation = size_of(spec, "encoder_ffn_dim"), activation_of(spec, "activation_function", "gelu")
        shape = replace(encoder_shape(own), head_dim=own_head_dim)

        def layer(index: int) -> EncoderLayer:
            name = f"model.layers.{index}"
            attention = self.encoder_attention(spec, context, f"{name}.self_attn", shape, index)
            mlp = MLP(context, f"{name}.mlp", size, inner, activation)
            norms = [self._named_norm(context, f"{name}.{norm}", size) for norm in ("attention_norm", "mlp_norm")]
            if self.norms_first:
                return PreNormLayer(context.ops, norms[0], attention, norms[1], mlp)
            return PostNormLayer(attention, norms[0], mlp, norms[1])

        layers = [layer(index) for index in range(own.num_layers)]
        last = self._named_norm(context, "last_norm", size) if self.norms_first else None
        return Encoder(self._encoder_embedding(own, context, embed, scale), layers, Heads(), last)

    def _encoder_embedding(
        self, spec: ModelSpec, context: ModelContext, embed: Embedding | None, scale: float
    ) -> Embedding:
        """Builds what makes hidden states of the encoder's input.

        Args:
            spec: facts of the encoder.
            embed: the table of tokens that both sides share; None: the encoder has its own.
            scale: of embeddings.
        """
        if embed is None:
            words = VocabularyWeight(context, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
            embed = VocabEmbedding(context, words, scale)
        return self._positioned(spec, context, embed, "encoder")

    def _layer(
        self, spec: ModelSpec, context: ModelContext, place: LayerPlace, before: Norm | None, last: Norm
    ) -> CrossLayer:
        """Builds a layer of the decoder; `before` is the previous layer's last norm, `last` its own."""
        size, shape = spec.hidden_size, attention_shape(spec)
        inner, activation = size_of(spec, "decoder_ffn_dim"), activation_of(spec, "activation_function", "gelu")
        bias = self.attention_biases
        attention = Attention(context, place, shape, None, qkv_bias=bias, output_bias=bias)
        cross = CrossAttention(context, cross_place(place, spec), shape, encoder_size=self.encoder_size, bias=bias)
        mlp = MLP(context, f"{place.name}.mlp", size, inner, activation)
        attention_norm = self._named_norm(context, f"{place.name}.attention_norm", size)
        cross_norm = self._named_norm(context, f"{place.name}.cross_norm", size)
        if self.norms_first:
            return PreNormCrossLayer(attention_norm, attention, cross_norm, cross, last, mlp)
        return PostNormCrossLayer(before, attention, attention_norm, cross, cross_norm, mlp)

    def _named_norm(self, context: ModelContext, name: str, size: int) -> Norm:
        return _STYLE.layer(context, name, size)

    def ends(self, side: str) -> dict[str, str]:
        """Returns the names of a side's tensors outside its layers; `side` is its prefix in the checkpoint."""
        return {
            "positions": f"{side}.embed_positions",
            "embedding_norm": f"{side}.layernorm_embedding",
            "last_norm": f"{side}.layer_norm",
        }

    def _renamed(self, context: ModelContext, side: str, tokens: str, pieces: Mapping[str, Piece] = {}) -> ModelContext:
        """Returns a context that finds the tensors of one side under their names in the checkpoint.

        `pieces` are those of its layers that differ from the decoder's.
        """
        ends = {"lm_head": self.HEAD, "model.embed_tokens": tokens, **self.ends(side)}
        weights = self.weights_type(context.weights, {**_PIECES, **pieces}, layer=f"{side}.layers.{{}}", ends=ends)
        return replace(context, weights=weights)


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """Norms before blocks, after the embedding, and after all layers."""

    norms_first = True


class MvpForConditionalGeneration(BartForConditionalGeneration):
    """BART, but for prompts of vectors, which no checkpoint turns on."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        if spec.hf_config.get("use_prompt"):
            raise SettingError(f"{spec.name}: use_prompt is not supported in {spec.architecture}, only false.")
        super().__init__(spec, context)


class M2M100ForConditionalGeneration(BartForConditionalGeneration):
    """Norms before blocks and after all layers; sinusoids behind the position of padding."""

    norms_first = True
    norms_embedding = False

    def position_rows(self, spec: ModelSpec, context: ModelContext, side: SideName) -> Tensor:
        first = spec.hf_config.get("pad_token_id", 1) + 1
        rows = spread_sinusoids(context.max_model_len + first, spec.hidden_size)[first:].clone()
        return rows.to(context.device, context.dtype)


class MarianMTModel(BartForConditionalGeneration):
    """Norms after blocks, sinusoids; encoder and decoder may have a vocabulary each."""

    norms_embedding = False

    def position_rows(self, spec: ModelSpec, context: ModelContext, side: SideName) -> Tensor:
        return interleaved_sinusoids(context.max_model_len, spec.hidden_size).to(context.device, context.dtype)


class PegasusForConditionalGeneration(MarianMTModel):
    """Norms before blocks and after all layers."""

    norms_first = True


def _stem(context: ModelContext, base: str) -> str:
    """Returns the prefix of all tensors but the head's, which checkpoints of the model without a head lack."""
    names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    return "" if any(context.find(f"{name}.weight") is not None for name in names) else f"{base}."


def _tokens(context: ModelContext, stem: str, side: str) -> str:
    """Returns the stored name of a side's table of tokens, which is one for both if the checkpoint has it."""
    shared = f"{stem}shared"
    names = [shared, f"{stem}{side}.embed_tokens", f"{stem}decoder.embed_tokens", f"{stem}encoder.embed_tokens"]
    return next((name for name in names if context.find(f"{name}.weight") is not None), shared)
