"""LFM2 (arXiv:2511.23404): gated short convolutions, and attention in some layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention import Attention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.rotary import RotaryEmbedding
from quire.executor.layers.short_conv import ShortConv
from quire.executor.models.decoder import attention_shape, vocabulary_ends
from quire.executor.models.hybrid import Block, FeedForwardBlock, HybridDecoder, LayerKind, MixerBlock, places_by_kind
from quire.executor.weights.rearranged import Piece, RearrangedWeights

_NAMES = {
    "self_attn.o_proj": "self_attn.out_proj", "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip
_KINDS: dict[str, LayerKind] = {"conv": "recurrent", "full_attention": "attention"}


class Lfm2ForCausalLM(HybridDecoder):
    """Queries and keys are normalised; the final norm is called that of the embedding."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        context = replace(
            context, weights=RearrangedWeights(context.weights, {name: Piece(own) for name, own in _NAMES.items()})
        )
        norm = NormStyle(config.get("norm_eps", 1e-5))
        rotary = RotaryEmbedding(context, {"rope_theta": 1_000_000.0, **config}, spec.head_dim)
        width, bias = config.get("conv_L_cache", 3), config.get("conv_bias", False)
        places = places_by_kind(context, [_KINDS[kind] for kind in _layer_types(spec)])
        kinds = [_layer_types(spec)[place.index] for place in places]
        mixers = [
            ShortConv(context, place, f"{place.name}.conv", size, width, bias=bias)
            if kind == "conv"
            else Attention(context, place, attention_shape(spec), rotary, qk_norm=norm)
            for place, kind in zip(places, kinds, strict=True)
        ]
        feed_forward_size = _feed_forward_size(config)
        blocks: list[Block] = []
        for place, mixer in zip(places, mixers, strict=True):
            mlp = GatedMLP(context, f"{place.name}.mlp", size, feed_forward_size, "silu")
            blocks += [
                MixerBlock(RMSNorm(context, f"{place.name}.operator_norm", size, norm), mixer),
                FeedForwardBlock(RMSNorm(context, f"{place.name}.ffn_norm", size, norm), mlp),
            ]
        is_tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
        embed, head = vocabulary_ends(spec, context, is_tied=is_tied)
        super().__init__(embed, blocks, RMSNorm(context, "model.embedding_norm", size, norm), head, mixers)


def _layer_types(spec: ModelSpec) -> list[str]:
    """The kind of each layer: `layer_types`, or in older configs the list of those with attention.

    Raises:
        ModelLoadError: another kind, or too few of them.
    """
    config = spec.hf_config
    attending = config.get("full_attn_idxs")
    attending = range(spec.num_layers) if attending is None else attending
    types = config.get("layer_types") or [
        "full_attention" if index in attending else "conv" for index in range(spec.num_layers)
    ]
    if len(types) < spec.num_layers or set(types) - set(_KINDS):
        raise ModelLoadError(
            f"config.json of {spec.name}: layer_types must name conv or full_attention for each of {spec.num_layers} "
            f"layers, got {types}."
        )
    return types


def _feed_forward_size(config: Mapping[str, Any]) -> int:
    """Two thirds of the stated size, times a factor, rounded up; unless it is stated as it is."""
    stated = config.get("block_ff_dim", config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", True):
        return stated
    adjusted, factor = int(2 * stated / 3), config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return adjusted
    unit = config.get("block_multiple_of", 256)
    return -(-int(factor * adjusted) // unit) * unit
