"""Granite 3 and 4, dense (arXiv:2405.04324): Llama with multipliers."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import (
    Decoder,
    MLPMaker,
    attention_shape,
    layer_places,
    mlp_maker,
    norm_style,
    vocabulary_ends,
)
from quire.ops.backend import AttentionForm


class GraniteForCausalLM(Decoder):
    """Embeddings, scores and each block's output are multiplied; logits are divided."""

    def __init__(self, spec: ModelSpec, context: ModelContext, make_mlp: MLPMaker | None = None) -> None:
        config, style, size = spec.hf_config, norm_style(spec), spec.hidden_size
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        form = AttentionForm(config["attention_multiplier"])
        bias = config["attention_bias"]
        make_mlp = make_mlp or mlp_maker(spec, context, bias=config.get("mlp_bias", False))

        def layer(place: LayerPlace) -> ResidualLayer:
            attention = Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias, form=form
            )  # fmt: skip
            return ResidualLayer(
                context.ops, attention, make_mlp(place),
                before_attention=style.layer(context, f"{place.name}.input_layernorm", size),
                before_mlp=style.layer(context, f"{place.name}.post_attention_layernorm", size),
                multiplier=config["residual_multiplier"],
            )  # fmt: skip

        embed, head = vocabulary_ends(
            spec, context, is_tied=config["tie_word_embeddings"],
            scale=config["embedding_multiplier"], logit_scale=1 / config["logits_scaling"],
        )  # fmt: skip
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", size), head)
