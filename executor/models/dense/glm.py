"""GLM-4 (arXiv:2406.12793): neighbouring elements in a part of each head are rotated."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import Norm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import (
    Decoder,
    activation_of,
    attention_shape,
    layer_places,
    norm_style,
    size_of,
    vocabulary_ends,
)
from quire.executor.weights.rearranged import Pairs, Piece, RearrangedWeights, fused


class GlmForCausalLM(Decoder):
    """Llama with biases on queries, keys and values; gate and up are stored as one layer."""

    before_mlp = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, style, size = spec.hf_config, norm_style(spec), spec.hidden_size
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        pairs = Pairs(spec.head_dim, rotary.dim)
        gate, up = fused("mlp.gate_up_proj", *[size_of(spec, "intermediate_size")] * 2)
        pieces = {
            "self_attn.q_proj": Piece("self_attn.q_proj", pairs=pairs),
            "self_attn.k_proj": Piece("self_attn.k_proj", pairs=pairs),
            "mlp.gate_proj": gate, "mlp.up_proj": up,
        }  # fmt: skip
        context = replace(context, weights=RearrangedWeights(context.weights, pieces))
        bias, activation = config["attention_bias"], activation_of(spec, "hidden_act")

        def layer(place: LayerPlace) -> ResidualLayer:
            def norm(name: str | None) -> Norm | None:
                return style.layer(context, f"{place.name}.{name}", size) if name else None

            attention = Attention(context, place, attention_shape(spec), rotary, qkv_bias=bias)
            mlp = GatedMLP(context, f"{place.name}.mlp", size, size_of(spec, "intermediate_size"), activation)
            return ResidualLayer(
                context.ops, attention, mlp,
                before_attention=norm("input_layernorm"), before_mlp=norm(self.before_mlp),
                after_attention=norm(self.after_attention),
                after_mlp=norm(self.after_mlp),
            )  # fmt: skip

        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", size), head)


class Glm4ForCausalLM(GlmForCausalLM):
    """Each block is normalized on both sides."""

    after_attention = "post_self_attn_layernorm"
    after_mlp = "post_mlp_layernorm"
