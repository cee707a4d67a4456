"""Jamba (arXiv:2403.19887): Mamba and attention in turn, and a mixture of experts in every second layer."""

import math

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.recurrent.mamba import MambaMixer, MambaShape
from quire.executor.models.decoder import FeedForward, activation_of, attention_shape, norm_style, vocabulary_ends
from quire.executor.models.hybrid_decoder import LayerKind, PairedDecoder, places_by_kind
from quire.ops.routing import Routing


class JambaForCausalLM(PairedDecoder):
    """No positions are encoded; a mixer's dt, b and c are normalized."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        dt_rank = config["mamba_dt_rank"]
        bias = config["mamba_proj_bias"]
        shape = MambaShape(
            hidden_size=size, channels=config["mamba_expand"] * size, state_size=config["mamba_d_state"],
            dt_rank=math.ceil(size / 16) if dt_rank == "auto" else dt_rank, conv_width=config["mamba_d_conv"],
            conv_bias=config["mamba_conv_bias"], bias=bias, parameter_norm="weighted",
            norm_eps=norm_style(spec).eps,
        )  # fmt: skip
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        kinds: list[LayerKind] = [
            "attention" if index % period == offset else "recurrent" for index in range(spec.num_layers)
        ]

        def mixer(place: LayerPlace) -> Attention | MambaMixer:
            if kinds[place.index] == "recurrent":
                return MambaMixer(context, place, shape, f"{place.name}.mamba")
            return Attention(context, place, attention_shape(spec), None)

        super().__init__(
            spec, context, places_by_kind(context, kinds), mixer, lambda place: _feed_forward(spec, context, place),
            vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"]),
            norm_names=("input_layernorm", "pre_ff_layernorm"), final_norm="final_layernorm",
        )  # fmt: skip


def _feed_forward(spec: ModelSpec, context: ModelContext, place: LayerPlace) -> FeedForward:
    config, name = spec.hf_config, f"{place.name}.feed_forward"
    activation, num_experts = activation_of(spec, "hidden_act"), config["num_experts"]
    is_sparse = place.index % config["expert_layer_period"] == config["expert_layer_offset"]
    if num_experts < 2 or not is_sparse:
        return GatedMLP(context, name, spec.hidden_size, config["intermediate_size"], activation)
    shape = ExpertShape(num_experts, spec.hidden_size, config["intermediate_size"])
    routing, stored = Routing(config["num_experts_per_tok"]), SeparateExperts(f"{name}.experts.{{}}")
    return Mixture(context, [RoutedExperts(context, f"{name}.router", routing, stored, shape, activation)])
