"""OPT (arXiv:2205.01068)."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.vocabulary import positioned_embedding
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import (
    Decoder,
    SettingError,
    activation_of,
    attention_shape,
    layer_places,
    size_of,
    vocabulary_ends,
)
from quire.executor.weights.rearranged import Piece, RearrangedWeights

_PIECES = {
    "input_layernorm": Piece("self_attn_layer_norm"),
    "self_attn.o_proj": Piece("self_attn.out_proj"),
    "post_attention_layernorm": Piece("final_layer_norm"),
    "mlp.up_proj": Piece("fc1"),
    "mlp.down_proj": Piece("fc2"),
}
_ENDS = {"model.embed_tokens": "model.decoder.embed_tokens", "model.norm": "model.decoder.final_layer_norm"}
_FIRST_POSITION = 2  # the rows before it are for padding


class OPTForCausalLM(Decoder):
    """Layer norms, learned positions, a feed-forward network without a gate, biases everywhere."""

    SIZES = ("ffn_dim", "max_position_embeddings")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        if not config["do_layer_norm_before"] or config.get("word_embed_proj_dim", size) != size:
            raise SettingError(
                f"{spec.name}: OPT with do_layer_norm_before false or a word_embed_proj_dim of its own has no file "
                "here; its class of Transformers has, with --model-impl auto."
            )
        context = replace(
            context,
            weights=RearrangedWeights(context.weights, _PIECES, layer="model.decoder.layers.{}", ends=_ENDS),
        )
        has_weight, bias = config["layer_norm_elementwise_affine"], config["enable_bias"]
        style = NormStyle(1e-5, is_centred=True, has_weight=has_weight, has_bias=has_weight)
        ffn_size, activation = size_of(spec, "ffn_dim"), activation_of(spec, "activation_function", "relu")

        def layer(place: LayerPlace) -> ResidualLayer:
            attention = Attention(context, place, attention_shape(spec), None, qkv_bias=bias, output_bias=bias)
            return ResidualLayer(
                context.ops, attention, MLP(context, f"{place.name}.mlp", size, ffn_size, activation, bias=bias),
                before_attention=style.layer(context, f"{place.name}.input_layernorm", size),
                before_mlp=style.layer(context, f"{place.name}.post_attention_layernorm", size),
            )  # fmt: skip

        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        positioned = positioned_embedding(
            context, embed, "model.decoder.embed_positions.weight", spec.max_position_embeddings, size,
            first=_FIRST_POSITION,
        )  # fmt: skip
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(positioned, layers, style.layer(context, "model.norm", size), head)
