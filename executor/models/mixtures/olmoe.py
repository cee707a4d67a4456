"""OLMoE (arXiv:2409.02060): 64 small experts, and the attention of OLMo 2 behind norms."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.decoder import (
    PreNormDecoder,
    SettingError,
    activation_of,
    attention_shape,
    norm_style,
    size_of,
)
from quire.executor.models.dense.olmo2 import Olmo2Attention
from quire.ops.routing import Routing


class OlmoeForCausalLM(PreNormDecoder):
    """Queries and keys are normalized as whole projections."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        if config.get("clip_qkv") is not None:
            raise SettingError(f"{spec.name}: clip_qkv {config['clip_qkv']} is not supported; only null.")
        rotary, bias = RotaryEmbedding(context, config, spec.head_dim), config["attention_bias"]
        num_experts, top_k = size_of(spec, "num_experts", "num_local_experts"), size_of(spec, "num_experts_per_tok")
        shape = ExpertShape(num_experts, spec.hidden_size, size_of(spec, "intermediate_size"))
        routing = Routing(top_k, renormalize=config["norm_topk_prob"])
        activation = activation_of(spec, "hidden_act")

        def attention(place: LayerPlace) -> Attention:
            return Olmo2Attention(
                context, place, attention_shape(spec), rotary, norm_style(spec), qkv_bias=bias, output_bias=bias
            )  # fmt: skip

        def mixture(place: LayerPlace) -> Mixture:
            name = f"{place.name}.mlp"
            stored = SeparateExperts(f"{name}.experts.{{}}")
            return Mixture(context, [RoutedExperts(context, f"{name}.gate", routing, stored, shape, activation)])

        super().__init__(spec, context, attention, mixture)
