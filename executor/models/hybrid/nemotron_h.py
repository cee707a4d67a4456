"""Nemotron-H (arXiv:2504.03624) and Nemotron 3 (2512.20856): a layer is a Mamba 2 mixer, attention, a feed-forward
network or a mixture of experts."""

import math
from dataclasses import replace

from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.experts import Experts
from quire.executor.layers.experts.mixture import Mixture, PartialLayer, RoutedExperts, read_router
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts
from quire.executor.layers.linear import ColumnLinear, RowLinear, whole
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.recurrent.base import RecurrentLayer
from quire.executor.layers.recurrent.mamba2 import Mamba2Mixer, Mamba2Shape
from quire.executor.models.decoder import FeedForward, activation_of, attention_shape, size_of, vocabulary_ends
from quire.executor.models.hybrid_decoder import (
    Block,
    FeedForwardBlock,
    HybridDecoder,
    MixerBlock,
    layer_kinds,
    places_by_kind,
)
from quire.executor.weights.readers import Shard
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.routing import Routing

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


class NemotronHForCausalLM(HybridDecoder):
    """No positions are encoded; one norm a layer. The residual stream has the model's type."""

    SIZES = ("max_position_embeddings",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        types = _layer_types(spec)
        kinds, norm = layer_kinds(types, spec), NormStyle(config["layer_norm_epsilon"])
        pieces = {f"self_attn.{part}_proj": Piece(f"mixer.{part}_proj") for part in "qkvo"}
        ends = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}
        stored = RearrangedWeights(context.weights, pieces, layer="backbone.layers.{}", ends=ends)
        context = replace(context, weights=stored)
        shape = _mamba2_shape(spec, norm.eps)

        def block(place: LayerPlace) -> Block:
            before, name = RMSNorm(context, f"{place.name}.norm", size, norm), f"{place.name}.mixer"
            match kinds[place.index]:
                case "feed_forward":
                    return FeedForwardBlock(before, _feed_forward(spec, context, name, types[place.index]))
                case "attention":
                    mixers.append(Attention(context, place, attention_shape(spec), None))
                case "recurrent":
                    mixers.append(Mamba2Mixer(context, place, shape, name))
            return MixerBlock(before, mixers[-1])

        mixers: list[Attention | RecurrentLayer] = []
        blocks = [block(place) for place in places_by_kind(context, kinds)]
        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        super().__init__(embed, blocks, RMSNorm(context, "model.norm", size, norm), head, mixers)


class LatentExperts:
    """Experts that read and write a smaller latent space, chosen by the whole hidden state."""

    def __init__(
        self, spec: ModelSpec, context: ModelContext, name: str, routing: Routing, shape: ExpertShape, *, bias: bool
    ) -> None:
        size, latent = shape.hidden_size, size_of(spec, "moe_latent_size")
        activation = activation_of(spec, "mlp_hidden_act", "relu2")
        stored = SeparateExperts(f"{name}.experts.{{}}", gate=None)
        self._ops = context.ops
        self._router = read_router(
            context, f"{name}.gate", routing, shape, correction=f"{name}.gate.e_score_correction_bias"
        )  # fmt: skip
        self._enter = ColumnLinear(context, [whole(f"{name}.fc1_latent_proj", latent)], size, bias=bias)
        self._experts = Experts(context, stored, shape._replace(hidden_size=latent), routing.top_k, activation)
        self._leave = RowLinear(context, f"{name}.fc2_latent_proj", latent, size, Shard(1, 0, latent), bias=bias)
        self.activation_size = self._experts.activation_size + 2 * latent

    def partial(self, x: Tensor) -> Tensor:
        """Computes a rank's part. The projection out of the latent space is linear, so ranks' parts are summed after
        it.
        """
        ids, weights = self._ops.route(x, self._router)
        return self._leave.partial(self._experts.partial(self._enter(x), ids, weights))


def _feed_forward(spec: ModelSpec, context: ModelContext, name: str, kind: str) -> FeedForward:
    """Builds an MLP, or experts without gates, routed as in DeepSeek V3, with a shared one."""
    config, size = spec.hf_config, spec.hidden_size
    activation, bias = activation_of(spec, "mlp_hidden_act", "relu2"), config["mlp_bias"]
    if kind == "mlp":
        return MLP(context, name, size, size_of(spec, "intermediate_size"), activation, bias=bias)
    shape = ExpertShape(size_of(spec, "n_routed_experts"), size, size_of(spec, "moe_intermediate_size"))
    routing = Routing(
        size_of(spec, "num_experts_per_tok"), "sigmoid", renormalize=config["norm_topk_prob"],
        scale=config["routed_scaling_factor"], num_groups=config.get("n_group") or 1,
        top_groups=config.get("topk_group") or 1, group_best=2,
    )  # fmt: skip
    routed: PartialLayer
    if config.get("moe_latent_size") is not None:
        routed = LatentExperts(spec, context, name, routing, shape, bias=bias)
    else:
        routed = RoutedExperts(
            context, f"{name}.gate", routing, SeparateExperts(f"{name}.experts.{{}}", gate=None), shape, activation,
            correction=f"{name}.gate.e_score_correction_bias",
        )  # fmt: skip
    shared_size = size_of(spec, "moe_shared_expert_intermediate_size")
    shared = MLP(context, f"{name}.shared_experts", size, shared_size, activation, bias=bias)
    return Mixture(context, [routed, shared])


def _mamba2_shape(spec: ModelSpec, norm_eps: float) -> Mamba2Shape:
    config = spec.hf_config
    bias = config["use_bias"]
    return Mamba2Shape(
        spec.hidden_size, num_heads=size_of(spec, "mamba_num_heads"), head_dim=size_of(spec, "mamba_head_dim"),
        num_groups=size_of(spec, "n_groups"), state_size=size_of(spec, "ssm_state_size"),
        conv_width=size_of(spec, "conv_kernel"), norm_eps=norm_eps, conv_bias=config["use_conv_bias"],
        bias=bias, output_bias=bias, dt_limit=(config["time_step_min"], math.inf),
    )  # fmt: skip


def _layer_types(spec: ModelSpec) -> list[str]:
    """Returns each layer's type, by its name or by its letter in `hybrid_override_pattern`."""
    config = spec.hf_config
    types = config.get("layers_block_type") or config.get("layer_types")
    if types is None:
        types = [_PATTERN.get(letter, letter) for letter in config.get("hybrid_override_pattern", "")]
    return types
