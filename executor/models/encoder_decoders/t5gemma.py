"""T5Gemma (arXiv:2504.06225): layers of Gemma 2 on both sides; those of the decoder also attend to the encoder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.cross import CrossAttention
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.step_context import StepContext
from quire.executor.layers.vocabulary import Embedding, VocabEmbedding, VocabularyWeight
from quire.executor.models.decoder import (
    activation_of,
    attention_shape,
    layer_places,
    layer_windows,
    size_of,
    vocabulary_ends,
)
from quire.executor.models.dense.gemma2 import gemma_factor
from quire.executor.models.encoder_decoders.encoder_decoder import EncoderDecoder, cross_place, encoder_context
from quire.executor.models.encoders.encoder import Encoder, TokenMixer
from quire.executor.models.encoders.heads import Heads
from quire.executor.weights.rearranged import RearrangedWeights
from quire.ops.activations import PlainActivation
from quire.ops.backend import AttentionForm, Backend


class Side:
    """The settings of one side, and what both build alike."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        """Takes the facts of the side, whose fields are at the top of `hf_config`."""
        config = spec.hf_config
        self.spec = spec
        self.context = context
        self.style = NormStyle(config.get("rms_norm_eps", 1e-6), is_offset=True)
        self.bias: bool = config.get("attention_bias", False)
        self.activation: PlainActivation = activation_of(spec, "hidden_activation", "gelu_pytorch_tanh")
        scale = config.get("query_pre_attn_scalar", 256) ** -0.5
        self.form = AttentionForm(scale, softcap=config.get("attn_logit_softcapping"))
        self.types = config.get("layer_types") or ["sliding_attention", "full_attention"] * spec.num_layers
        self.windows = layer_windows(self.types, config.get("sliding_window"), spec.num_layers)
        self.qk_norm: NormStyle | None = None
        self.rotaries = self._rotaries()

    def _rotaries(self) -> list[RotaryEmbedding]:
        """Returns the rotation of each layer."""
        return [RotaryEmbedding(self.context, self.spec.hf_config, self.spec.head_dim)] * self.spec.num_layers

    def form_of_decoder(self, index: int) -> AttentionForm:
        """Returns the form of self-attention in a layer of the decoder."""
        return self.form._replace(window=self.windows[index])

    def form_of_encoder(self, index: int) -> AttentionForm:
        """Returns the form of attention in a layer of the encoder."""
        window = self.windows[index]  # tokens up to `window` places away
        return self.form._replace(window=None if window is None else window + 1)

    def norms(self, layer: str, *blocks: str) -> list[tuple[Norm, Norm]]:
        """Builds the norms before and behind each block of a layer."""
        return [
            (self.norm(f"{layer}.pre_{block}_layernorm"), self.norm(f"{layer}.post_{block}_layernorm"))
            for block in blocks
        ]

    def norm(self, name: str) -> Norm:
        return self.style.layer(self.context, name, self.spec.hidden_size)

    def mlp(self, layer: str) -> GatedMLP:
        size = size_of(self.spec, "intermediate_size")
        return GatedMLP(self.context, f"{layer}.mlp", self.spec.hidden_size, size, self.activation)


class NormedEncoderLayer:
    """Computes `x + after(attention(before(x)))`, then the same with the feed-forward network."""

    def __init__(self, ops: Backend, attention: TokenMixer, mlp: GatedMLP, norms: Sequence[tuple[Norm, Norm]]) -> None:
        self.activation_size = attention.activation_size + mlp.activation_size
        self._ops = ops
        self._attention = attention
        self._mlp = mlp
        self._norms = norms

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        (before, after), (before_mlp, after_mlp) = self._norms
        x = self._ops.add(after(self._attention(before(x), step)), x)
        return self._ops.add(after_mlp(self._mlp(before_mlp(x))), x)


class _DecoderLayer:
    """Computes `x + after(block(before(x)))` for attention, attention to the encoder, and the feed-forward network."""

    def __init__(
        self, attention: Attention, cross: CrossAttention, mlp: GatedMLP, norms: Sequence[tuple[Norm, Norm]]
    ) -> None:
        self.attention = attention
        self.cross = cross
        self.mlp = mlp
        self._norms = norms

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepContext) -> tuple[Tensor, Tensor]:
        (before, after), (before_cross, after_cross), (before_mlp, after_mlp) = self._norms
        x, residual = before.add(x, residual)
        x, residual = before_cross.add(after(self.attention(x, step)), self.attention.outputs_of(residual, step))
        x, residual = before_mlp.add(after_cross(self.cross(x, step)), residual)
        return after_mlp(self.mlp(x)), residual


class T5GemmaForConditionalGeneration(EncoderDecoder):
    """Each block is normalized on both sides, every other layer has a window, scores and logits are capped."""

    SIZES = ("intermediate_size",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        side = Side(spec, _renamed(context, "model.decoder"))
        embed, head = vocabulary_ends(
            spec,
            side.context,
            is_tied=config.get("tie_word_embeddings", True),
            scale=gemma_factor(spec, context),
            softcap=config.get("final_logit_softcapping"),
        )
        own = own_spec(spec, config["encoder"])
        encoder = build_encoder(Side(own, _renamed(encoder_context(spec, context), "model.encoder")))
        layers = [_decoder_layer(side, place, own.hidden_size) for place in layer_places(spec, context)]
        super().__init__(encoder, embed, layers, side.norm("model.norm"), head)


def _decoder_layer(side: Side, place: LayerPlace, encoder_size: int) -> _DecoderLayer:
    context, shape, name = side.context, attention_shape(side.spec), place.name
    attention = Attention(
        context, place, shape, side.rotaries[place.index], qkv_bias=side.bias, output_bias=side.bias,
        form=side.form_of_decoder(place.index),
    )  # fmt: skip
    cross = CrossAttention(
        context, cross_place(place, side.spec), shape, encoder_size=encoder_size, bias=side.bias, form=side.form
    )
    return _DecoderLayer(attention, cross, side.mlp(name), side.norms(name, "self_attn", "cross_attn", "feedforward"))


def build_encoder(side: Side, embed: Embedding | None = None) -> Encoder:
    """Builds the layers of an encoder, with a table of tokens of its own if `embed` is None."""
    spec, context, shape = side.spec, side.context, attention_shape(side.spec)

    def layer(index: int) -> NormedEncoderLayer:
        name = f"model.layers.{index}"
        attention = SequenceAttention(
            context, f"{name}.self_attn", shape, side.rotaries[index], bias=side.bias, output_bias=side.bias,
            form=side.form_of_encoder(index), qk_norm=side.qk_norm,
        )  # fmt: skip
        return NormedEncoderLayer(context.ops, attention, side.mlp(name), side.norms(name, "self_attn", "feedforward"))

    if embed is None:
        words = VocabularyWeight(context, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        embed = VocabEmbedding(context, words, gemma_factor(spec, context))
    return Encoder(embed, [layer(index) for index in range(spec.num_layers)], Heads(), side.norm("model.norm"))


def own_spec(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Returns the facts of the encoder, which config.json has in an object of its own."""
    heads, size = config["num_attention_heads"], config["hidden_size"]
    return structs.replace(
        spec,
        hf_config={**config},
        num_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or size // heads,
        hidden_size=size,
        vocab_size=config.get("vocab_size", spec.vocab_size),
    )


def _renamed(context: ModelContext, side: str) -> ModelContext:
    ends = {"model.embed_tokens": f"{side}.embed_tokens", "model.norm": f"{side}.norm", "lm_head": "lm_head.out_proj"}
    return replace(context, weights=RearrangedWeights(context.weights, {}, layer=f"{side}.layers.{{}}", ends=ends))
