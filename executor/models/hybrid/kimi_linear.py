"""Kimi Linear (arXiv:2510.26692): most layers are Kimi Delta Attention, others latent attention without positions."""

from dataclasses import replace

import msgspec

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.latent import LatentAttention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.recurrent.kimi_delta import KimiDeltaAttention, KimiDeltaShape
from quire.executor.models.decoder import norm_style, size_of, vocabulary_ends
from quire.executor.models.hybrid_decoder import PairedDecoder, layer_kinds, places_by_kind
from quire.executor.models.mixtures.deepseek import latent_shape
from quire.executor.models.mixtures.glm4_moe import mixture_maker
from quire.executor.weights.rearranged import Piece, RearrangedWeights

_FIELDS = {
    "n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group", "n_shared_experts": "num_shared_experts",
}  # fmt: skip
"""DeepSeek V3's field names, and Kimi's."""

_GATES = {f"self_attn.{x}_proj.{i}": f"self_attn.{x}_{half}_proj" for x in "fg" for i, half in enumerate("ab")}
_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class KimiLinearForCausalLM(PairedDecoder):
    """The experts are those of DeepSeek V3. Only the order of the delta rules encodes positions."""

    SIZES = ("intermediate_size", "moe_intermediate_size")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        spec = in_terms_of_deepseek(spec)
        context = replace(context, weights=RearrangedWeights(context.weights, _pieces(spec, context)))
        kinds, shape = layer_kinds(_layer_types(spec), spec), _delta_shape(spec)
        latent, bias = latent_shape(spec), spec.hf_config["attention_bias"]

        def mixer(place: LayerPlace) -> LatentAttention | KimiDeltaAttention:
            if kinds[place.index] == "recurrent":
                return KimiDeltaAttention(context, place, shape)
            return LatentAttention(context, place, latent, None, scale=latent.q_head_dim**-0.5, bias=bias)

        ends = vocabulary_ends(spec, context, is_tied=spec.hf_config["tie_word_embeddings"])
        places = places_by_kind(context, kinds)
        super().__init__(spec, context, places, mixer, mixture_maker(spec, context), ends)


def in_terms_of_deepseek(spec: ModelSpec) -> ModelSpec:
    """Returns `spec` with DeepSeek V3's names of the experts' fields."""
    config = spec.hf_config
    renamed = {name: config[own] for name, own in _FIELDS.items() if own in config}
    return msgspec.structs.replace(spec, hf_config={**config, **renamed})


def _pieces(spec: ModelSpec, context: ModelContext) -> dict[str, Piece]:
    """Maps `block_sparse_moe`, the name of layers with experts; Transformers stores dense layers under it, too."""
    block, names = "block_sparse_moe", {**_GATES, "mlp.gate": "block_sparse_moe.gate"}
    for part, own in _EXPERT.items():
        names[f"mlp.shared_experts.{part}"] = f"{block}.shared_experts.{part}"
        for index in range(size_of(spec, "n_routed_experts")):
            names[f"mlp.experts.{index}.{part}"] = f"{block}.experts.{index}.{own}"
        if context.find(f"model.layers.0.{block}.{part}.weight") is not None:
            names[f"mlp.{part}"] = f"{block}.{part}"
    return {name: Piece(own) for name, own in names.items()}


def _layer_types(spec: ModelSpec) -> list[str]:
    """Returns `layer_types`, or reads `linear_attn_config`, which counts layers from 1; by default every fourth
    attends.
    """
    config = spec.hf_config
    listed = config.get("linear_attn_config") or {}
    types, attending = config.get("layer_types"), listed.get("full_attn_layers")
    if types is not None:
        return types
    attending = range(5, spec.num_layers + 1, 4) if attending is None else attending
    return ["full_attention" if index + 1 in attending else "linear_attention" for index in range(spec.num_layers)]


def _delta_shape(spec: ModelSpec) -> KimiDeltaShape:
    config = spec.hf_config
    listed = config.get("linear_attn_config") or {}
    head_dim = listed.get("head_dim", config["linear_head_dim"])
    return KimiDeltaShape(
        spec.hidden_size,
        listed.get("num_heads", config["linear_num_heads"]),
        head_dim,
        listed.get("short_conv_kernel_size", config["linear_conv_kernel_dim"]),
        gate_rank=head_dim,
        least_log_decay=None,
        eps=norm_style(spec).eps,
    )
