"""MiniCPM 3 (arXiv:2404.06395): latent attention with multipliers, and plain feed-forward blocks."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import Decoder, layer_places, mlp_maker, norm_style, vocabulary_ends
from quire.executor.models.mixtures.deepseek import LatentAttentionMaker


class MiniCPM3ForCausalLM(Decoder):
    """Embeddings and each block's output are multiplied; hidden states are divided before the head."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, style, size = spec.hf_config, norm_style(spec), spec.hidden_size
        make_attention = LatentAttentionMaker(spec, context, is_interleaved=False)
        make_mlp = mlp_maker(spec, context)
        depth = config.get("scale_depth")
        multiplier = 1.0 if depth is None else depth * spec.num_layers**-0.5

        def layer(place: LayerPlace) -> ResidualLayer:
            return ResidualLayer(
                context.ops, make_attention(place), make_mlp(place),
                before_attention=style.layer(context, f"{place.name}.input_layernorm", size),
                before_mlp=style.layer(context, f"{place.name}.post_attention_layernorm", size),
                multiplier=multiplier,
            )  # fmt: skip

        embed, head = vocabulary_ends(
            spec, context, is_tied=config["tie_word_embeddings"], scale=config["scale_emb"],
            logit_scale=(config.get("dim_model_base") or size) / size,
        )  # fmt: skip
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", size), head)
