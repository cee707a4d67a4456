"""GLM 4.5 to 4.7 (arXiv:2508.06471): the experts of DeepSeek V3 with grouped-query attention."""

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import stored_experts
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.decoder import (
    FeedForward,
    MLPMaker,
    PreNormDecoder,
    activation_of,
    attention_shape,
    mlp_maker,
    norm_style,
    size_of,
)
from quire.ops.backend import AttentionForm
from quire.ops.routing import Routing


class Glm4MoeForCausalLM(PreNormDecoder):
    """A part of each head is rotated; the larger models normalize queries and keys.

    Attributes:
        correction: see `mixture_maker`.
    """

    correction = "e_score_correction_bias"

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        bias = config.get("attention_bias", False)
        qk_norm = norm_style(spec) if config.get("use_qk_norm") else None
        form = AttentionForm(spec.head_dim**-0.5)

        def attention(place: LayerPlace) -> Attention:
            return Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, qk_norm=qk_norm, form=form
            )  # fmt: skip

        super().__init__(spec, context, attention, mixture_maker(spec, context, correction=self.correction))


def mixture_maker(
    spec: ModelSpec,
    context: ModelContext,
    routing: Routing | None = None,
    *,
    correction: str = "e_score_correction_bias",
) -> MLPMaker:
    """Builds the blocks of DeepSeek V2 and V3 (arXiv:2405.04434, 2412.19437): some are dense, the others have experts.

    Without `routing`, that is V3's, with sigmoid scores and corrections of them, which `correction` names.
    """
    config = spec.hf_config
    size = size_of(spec, "moe_intermediate_size")
    shape = ExpertShape(size_of(spec, "n_routed_experts"), spec.hidden_size, size)
    has_correction = routing is None
    routing = routing or Routing(
        size_of(spec, "num_experts_per_tok"),
        "sigmoid",
        renormalize=config["norm_topk_prob"],
        scale=config["routed_scaling_factor"],
        num_groups=config.get("n_group") or 1,
        top_groups=config.get("topk_group") or 1,
        group_best=2,
    )
    num_dense, types = config.get("first_k_dense_replace") or 0, config.get("mlp_layer_types")
    mlp, activation = mlp_maker(spec, context), activation_of(spec, "hidden_act")

    def make(place: LayerPlace) -> FeedForward:
        if types[place.index] == "dense" if types else place.index < num_dense:
            return mlp(place)
        name = f"{place.name}.mlp"
        routed = RoutedExperts(
            context, f"{name}.gate", routing, stored_experts(context, f"{name}.experts"), shape, activation,
            correction=f"{name}.gate.{correction}" if has_correction else None,
        )  # fmt: skip
        shared_size = size * (config.get("n_shared_experts") or 0)
        if not shared_size:
            return Mixture(context, [routed])
        shared = GatedMLP(context, f"{name}.shared_experts", spec.hidden_size, shared_size, activation)
        return Mixture(context, [routed, shared])

    return make
