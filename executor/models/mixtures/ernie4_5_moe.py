"""ERNIE 4.5, mixture of experts (ERNIE 4.5 technical report, 2025)."""

from dataclasses import replace

import torch

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, PartialLayer, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts
from quire.executor.layers.mlp import GatedMLP
from quire.executor.models.decoder import FeedForward, MLPMaker, SettingError, activation_of, mlp_maker, size_of
from quire.executor.models.dense.llama import LlamaForCausalLM
from quire.executor.weights.rearranged import Pairs, Piece, RearrangedWeights
from quire.ops.routing import Routing


class Ernie4_5_MoeForCausalLM(LlamaForCausalLM):
    """Llama with neighbouring elements rotated, and experts on some of the layers."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        if spec.hf_config.get("use_bias"):
            raise SettingError(f"{spec.name}: use_bias is not supported in {spec.architecture}.")
        pairs = Pairs(spec.head_dim, spec.head_dim)
        pieces = {f"self_attn.{name}_proj": Piece(f"self_attn.{name}_proj", pairs=pairs) for name in "qk"}
        context = replace(context, weights=RearrangedWeights(context.weights, pieces))
        super().__init__(spec, context, _mixture_maker(spec, context))


def _mixture_maker(spec: ModelSpec, context: ModelContext) -> MLPMaker:
    config, size = spec.hf_config, size_of(spec, "moe_intermediate_size")
    shape = ExpertShape(size_of(spec, "moe_num_experts", "num_experts"), spec.hidden_size, size)
    routing = Routing(size_of(spec, "moe_k", "num_experts_per_tok"), renormalize=True, floor=config["moe_norm_min"])
    mlp, activation = mlp_maker(spec, context), activation_of(spec, "hidden_act")
    last = config["moe_layer_end_index"]
    layers = range(config["moe_layer_start_index"], (spec.num_layers if last == -1 else last + 1))
    shared_size = size * (config.get("moe_num_shared_experts") or 0)

    def make(place: LayerPlace) -> FeedForward:
        if place.index not in layers or (place.index + 1) % config["moe_layer_interval"]:
            return mlp(place)
        name = f"{place.name}.mlp"
        correction = context.read(
            f"{name}.moe_statics.e_score_correction_bias", (1, shape.num_experts), dtype=torch.float32
        )  # fmt: skip
        parts: list[PartialLayer] = [
            RoutedExperts(
                context, f"{name}.gate", routing, SeparateExperts(f"{name}.experts.{{}}"), shape, activation,
                correction=correction[0],
            )
        ]  # fmt: skip
        if shared_size:
            parts.append(GatedMLP(context, f"{name}.shared_experts", spec.hidden_size, shared_size, activation))
        return Mixture(context, parts)

    return make
