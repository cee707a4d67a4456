"""The encoder of T5 (arXiv:1910.10683), mT5 (2010.11934), UMT5 (2304.09151) and LongT5 (2112.07916)."""

from collections.abc import Callable

import torch
from msgspec.structs import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.sequence import SequenceAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP, GatedMLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.vocabulary import Embedding
from quire.executor.models.decoder import FeedForward, SettingError, activation_of, size_of
from quire.executor.models.encoders.encoder import (
    Encoder,
    EncoderEmbedding,
    EncoderLayer,
    PreNormLayer,
    encoder_shape,
    relative_bias,
    renamed,
)
from quire.executor.models.encoders.heads import WORDS, HeadForms, Heads, read_words
from quire.executor.weights.rearranged import Piece
from quire.ops.activations import PlainActivation
from quire.ops.backend import AttentionForm

_PIECES = {
    "attention_norm": Piece("layer.0.layer_norm"),
    "mlp_norm": Piece("layer.1.layer_norm"),
}
_ATTENTION = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "distances": "relative_attention_bias",
}
_PIECES_OF_MLP = {"mlp.down_proj": Piece("layer.1.DenseReluDense.wo")}
_PLAIN = {"mlp.up_proj": Piece("layer.1.DenseReluDense.wi")}
_GATED = {
    "mlp.gate_proj": Piece("layer.1.DenseReluDense.wi_0"),
    "mlp.up_proj": Piece("layer.1.DenseReluDense.wi_1"),
}
_ENDS = {WORDS: "shared", "norm": "encoder.final_layer_norm"}


class T5EncoderModel(Encoder):
    """Norms before blocks, no biases, unscaled scores with biases by distance. All layers share those of the first."""

    SIZES: tuple[str, ...] = ("d_ff",)
    ATTENTION = "SelfAttention"
    has_shared_distances = True

    def __init__(self, spec: ModelSpec, context: ModelContext, embed: Embedding | None = None) -> None:
        """Takes the table of tokens as `embed`, if a decoder shares it."""
        config, size = spec.hf_config, spec.hidden_size
        attention_pieces = {name: Piece(f"layer.0.{self.ATTENTION}.{stored}") for name, stored in _ATTENTION.items()}
        pieces = _PIECES | attention_pieces | self.mlp_pieces(spec)
        context = renamed(context, (), "encoder.block.{}", pieces, _ENDS)
        style = NormStyle(config.get("layer_norm_epsilon", 1e-6))
        if embed is None:
            embed = EncoderEmbedding(context, read_words(spec, context, HeadForms(None), size))
        form_of = self._forms(spec, context)

        def norm(name: str) -> Norm:
            return style.layer(context, name, size)

        def layer(index: int) -> EncoderLayer:
            name = f"model.layers.{index}"
            attention = SequenceAttention(
                context, f"{name}.self_attn", encoder_shape(spec), bias=False, output_bias=False, form=form_of(index)
            )
            norms = norm(f"{name}.attention_norm"), norm(f"{name}.mlp_norm")
            return self.layer(spec, context, index, norms[0], attention, norms[1])

        super().__init__(
            embed,
            [layer(index) for index in range(spec.num_layers)],
            Heads(),
            norm("norm"),
        )

    def mlp_pieces(self, spec: ModelSpec) -> dict[str, Piece]:
        """Returns the places of the tensors of feed-forward blocks."""
        return _PIECES_OF_MLP | (_GATED if feed_forward(spec)[0] else _PLAIN)

    def layer(
        self,
        spec: ModelSpec,
        context: ModelContext,
        index: int,
        attention_norm: Norm,
        attention: SequenceAttention,
        mlp_norm: Norm,
    ) -> EncoderLayer:
        """Builds a layer of its norms and its attention."""
        mlp = plain_or_gated(spec, context, f"model.layers.{index}.mlp")
        return PreNormLayer(context.ops, attention_norm, attention, mlp_norm, mlp)

    def _forms(self, spec: ModelSpec, context: ModelContext) -> Callable[[int], AttentionForm]:
        """Returns what makes the form of a layer's attention."""
        config = spec.hf_config
        count = config.get("relative_attention_num_buckets", 32)
        reach = config.get("relative_attention_max_distance", 128)

        def form(index: int) -> AttentionForm:
            table = context.read(
                f"model.layers.{index}.distances.weight", (count, spec.num_attention_heads), dtype=torch.float32
            )
            return AttentionForm(1.0, distance_bias=relative_bias(table, context.max_model_len, reach))

        shared = form(0) if self.has_shared_distances else None
        return form if shared is None else lambda index: shared


class UMT5EncoderModel(T5EncoderModel):
    """Each layer has biases by distance of its own."""

    has_shared_distances = False


class LongT5EncoderModel(T5EncoderModel):
    """A token sees `local_radius` tokens on either side."""

    ATTENTION = "LocalSelfAttention"

    def _forms(self, spec: ModelSpec, context: ModelContext) -> Callable[[int], AttentionForm]:
        kind = spec.hf_config.get("encoder_attention_type", "local")
        if kind != "local":
            raise SettingError(
                f"{spec.name}: encoder_attention_type {kind!r} is not supported in {spec.architecture}, only 'local'."
            )
        form_of, window = super()._forms(spec, context), spec.hf_config.get("local_radius", 127) + 1
        return lambda index: form_of(index)._replace(window=window)


def plain_or_gated(spec: ModelSpec, context: ModelContext, name: str) -> FeedForward:
    """Builds the feed-forward block `name`."""
    (is_gated, activation), size, inner = feed_forward(spec), spec.hidden_size, size_of(spec, "d_ff")
    if is_gated:
        return GatedMLP(context, name, size, inner, activation)
    return MLP(context, name, size, inner, activation, bias=False)


def feed_forward(spec: ModelSpec) -> tuple[bool, PlainActivation]:
    """Returns whether the feed-forward block is gated, and its activation."""
    stated = str(spec.hf_config.get("feed_forward_proj", "relu"))
    name = stated.removeprefix("gated-")
    is_gated = name != stated
    # Of a gated block, the library's "gelu" is the approximation by tanh.
    own = "gelu_new" if is_gated and name == "gelu" else name
    return is_gated, activation_of(replace(spec, hf_config={"feed_forward_proj": own}), "feed_forward_proj")
