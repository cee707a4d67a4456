"""MiniMax M2: sigmoid scores without shared experts, and the attention of OLMo 2 behind norms."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.decoder import PreNormDecoder, activation_of, attention_shape, norm_style, size_of
from quire.executor.models.dense.olmo2 import Olmo2Attention
from quire.ops.routing import Routing


class MiniMaxM2ForCausalLM(PreNormDecoder):
    """Half of each head is rotated: `rotary_dim` in config.json, or the `partial_rotary_factor` of Transformers."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = dict(spec.hf_config)
        if "rotary_dim" in config:
            config["partial_rotary_factor"] = config["rotary_dim"] / spec.head_dim
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        shape = ExpertShape(size_of(spec, "num_local_experts"), spec.hidden_size, size_of(spec, "intermediate_size"))
        routing = Routing(size_of(spec, "num_experts_per_tok"), "sigmoid", renormalize=True)
        activation = activation_of(spec, "hidden_act")

        def attention(place: LayerPlace) -> Attention:
            return Olmo2Attention(context, place, attention_shape(spec), rotary, norm_style(spec))

        def mixture(place: LayerPlace) -> Mixture:
            name = f"{place.name}.block_sparse_moe"
            stored = SeparateExperts(f"{name}.experts.{{}}", gate="w1", up="w3", down="w2")
            routed = RoutedExperts(
                context, f"{name}.gate", routing, stored, shape, activation,
                correction=f"{name}.e_score_correction_bias",
            )  # fmt: skip
            return Mixture(context, [routed])

        super().__init__(spec, context, attention, mixture)
