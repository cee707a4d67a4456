"""Phi-3.5-MoE (arXiv:2404.14219) and GRIN-MoE (arXiv:2409.12136): two experts a token, chosen one after the other."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import (
    Decoder,
    activation_of,
    attention_shape,
    layer_places,
    size_of,
    vocabulary_ends,
)
from quire.ops.backend import AttentionForm
from quire.ops.routing import Routing


class PhimoeForCausalLM(Decoder):
    """Layer norms, biases. An expert's weight is its share among the experts with a score close to its own."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        style = NormStyle(config["rms_norm_eps"], is_centred=True, has_bias=True)
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        form = AttentionForm(spec.head_dim**-0.5, config.get("sliding_window"))
        bias, activation = config["attention_bias"], activation_of(spec, "hidden_act")
        shape = ExpertShape(size_of(spec, "num_local_experts"), size, size_of(spec, "intermediate_size"))
        jitter = config["router_jitter_noise"]
        routing = Routing(size_of(spec, "num_experts_per_tok"), "sparse_mixer", distance=2 * jitter)

        def layer(place: LayerPlace) -> ResidualLayer:
            def norm(name: str) -> Norm:
                return style.layer(context, f"{place.name}.{name}", size)

            attention = Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias, form=form
            )  # fmt: skip
            name = f"{place.name}.block_sparse_moe"
            stored = SeparateExperts(f"{name}.experts.{{}}", "w1", "w3", "w2")
            experts = RoutedExperts(context, f"{name}.gate", routing, stored, shape, activation)
            return ResidualLayer(
                context.ops, attention, Mixture(context, [experts]),
                before_attention=norm("input_layernorm"), before_mlp=norm("post_attention_layernorm"),
            )  # fmt: skip

        embed, head = vocabulary_ends(
            spec, context, is_tied=config["tie_word_embeddings"],
            head_bias=config["lm_head_bias"],
        )  # fmt: skip
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", size), head)
