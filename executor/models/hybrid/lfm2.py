"""LFM2 (arXiv:2511.23404), dense and with experts, and LFM3: gated short convolutions, and attention in some layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.mixture import Mixture, RoutedExperts
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.layers.experts.stored import SeparateExperts
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import Norm, NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.short_conv import ShortConv
from quire.executor.models.decoder import FeedForward, MLPMaker, attention_shape, mlp_maker, size_of, vocabulary_ends
from quire.executor.models.hybrid_decoder import (
    Block,
    FeedForwardBlock,
    HybridDecoder,
    LayerKind,
    MixerBlock,
    places_by_kind,
)
from quire.executor.weights.rearranged import Piece, RearrangedWeights
from quire.ops.backend import AttentionForm
from quire.ops.routing import Routing

_NAMES = {
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip
_LFM2_NAMES = {
    **_NAMES, "self_attn.o_proj": "self_attn.out_proj", "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
}  # fmt: skip
_LFM3_NAMES = {**_NAMES, "self_attn.g_proj": "self_attn.gate_proj"}

_KINDS: dict[str, LayerKind] = {"conv": "recurrent", "full_attention": "attention", "sliding_attention": "attention"}


class _ConvolutionalDecoder(HybridDecoder):
    """A layer is a convolution or attention, then a feed-forward network. The final norm has the embedding's name."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        types: Sequence[str],
        make_attention: Callable[[LayerPlace], Attention],
        make_mlp: MLPMaker,
        *,
        has_norms_after: bool = False,
    ) -> None:
        """Takes the layers' `types`, of `_KINDS`. With `has_norms_after`, the outputs of blocks are normalized, too."""
        config, size = spec.hf_config, spec.hidden_size
        width, bias = config["conv_L_cache"], config["conv_bias"]

        def norm(name: str) -> Norm:
            return _norm(spec).layer(context, name, size)

        def norm_after(name: str) -> Norm | None:
            return norm(name) if has_norms_after else None

        mixers: list[Attention | ShortConv] = []
        blocks: list[Block] = []
        for place in places_by_kind(context, [_KINDS[kind] for kind in types]):
            name = place.name
            if types[place.index] == "conv":
                mixers.append(ShortConv(context, place, f"{name}.conv", size, width, bias=bias))
            else:
                mixers.append(make_attention(place))
            before, after = norm(f"{name}.operator_norm"), norm_after(f"{name}.post_operator_norm")
            blocks.append(MixerBlock(before, mixers[-1], after))
            before, after = norm(f"{name}.ffn_norm"), norm_after(f"{name}.post_ffn_norm")
            blocks.append(FeedForwardBlock(before, make_mlp(place), after))
        is_tied = config.get("tie_embedding", config["tie_word_embeddings"])
        embed, head = vocabulary_ends(spec, context, is_tied=is_tied)
        super().__init__(embed, blocks, norm("model.embedding_norm"), head, mixers, ends=range(1, len(blocks), 2))


class Lfm2ForCausalLM(_ConvolutionalDecoder):
    """Queries and keys are normalized."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        context, size = _renamed(context, _LFM2_NAMES), _feed_forward_size(spec.hf_config)

        def mlp(place: LayerPlace) -> FeedForward:
            return GatedMLP(context, f"{place.name}.mlp", spec.hidden_size, size, "silu")

        super().__init__(spec, context, _lfm2_types(spec), _lfm2_attention(spec, context), mlp)


class Lfm2MoeForCausalLM(_ConvolutionalDecoder):
    """Experts with sigmoid scores and corrections of them (arXiv:2412.19437), except in the first layers."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, context = spec.hf_config, _renamed(context, _LFM2_NAMES)
        shape = ExpertShape(size_of(spec, "num_experts"), spec.hidden_size, size_of(spec, "moe_intermediate_size"))
        routing = Routing(
            size_of(spec, "num_experts_per_tok"), "sigmoid", renormalize=config["norm_topk_prob"],
            scale=config["routed_scaling_factor"],
        )  # fmt: skip
        num_dense, dense = config["num_dense_layers"], mlp_maker(spec, context)

        def mlp(place: LayerPlace) -> FeedForward:
            if place.index < num_dense:
                return dense(place)
            name = f"{place.name}.feed_forward"
            stored = SeparateExperts(f"{name}.experts.{{}}", gate="w1", up="w3", down="w2")
            correction = f"{name}.expert_bias" if config["use_expert_bias"] else None
            routed = RoutedExperts(context, f"{name}.gate", routing, stored, shape, correction=correction)
            return Mixture(context, [routed])

        super().__init__(spec, context, _lfm2_types(spec), _lfm2_attention(spec, context), mlp)


class Lfm3ForCausalLM(_ConvolutionalDecoder):
    """Every second attention has a window and another rotation; heads have gates; blocks have norms after them."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, context = spec.hf_config, _renamed(context, _LFM3_NAMES)
        types = _checked(spec, config.get("layer_types") or [_lfm3_type(index) for index in range(spec.num_layers)])
        rotaries = {
            kind: RotaryEmbedding(context, config, spec.head_dim, layer_type=kind) for kind in set(types) - {"conv"}
        }
        bias = config["attention_bias"]

        def attention(place: LayerPlace) -> Attention:
            kind = types[place.index]
            window = config["sliding_window"] if kind == "sliding_attention" else None
            return Attention(
                context, place, attention_shape(spec), rotaries[kind], qkv_bias=bias, output_bias=bias,
                qk_norm=_norm(spec), form=AttentionForm(spec.head_dim**-0.5, window),
                has_head_gates=config["use_attention_gate"],
            )  # fmt: skip

        super().__init__(
            spec, context, types, attention, mlp_maker(spec, context),
            has_norms_after=config["use_sandwich_norm"],
        )  # fmt: skip


def _renamed(context: ModelContext, names: Mapping[str, str]) -> ModelContext:
    pieces = {name: Piece(own) for name, own in names.items()}
    return replace(context, weights=RearrangedWeights(context.weights, pieces))


def _norm(spec: ModelSpec) -> NormStyle:
    return NormStyle(spec.hf_config["norm_eps"])


def _lfm2_attention(spec: ModelSpec, context: ModelContext) -> Callable[[LayerPlace], Attention]:
    rotary = RotaryEmbedding(context, spec.hf_config, spec.head_dim)
    return lambda place: Attention(context, place, attention_shape(spec), rotary, qk_norm=_norm(spec))


def _lfm2_types(spec: ModelSpec) -> list[str]:
    """Returns the kind of each layer: `layer_types`, or in older configs the list of layers with attention."""
    config = spec.hf_config
    attending = config.get("full_attn_idxs")
    attending = range(spec.num_layers) if attending is None else attending
    types = config.get("layer_types") or [
        "full_attention" if index in attending else "conv" for index in range(spec.num_layers)
    ]
    return _checked(spec, types, "conv", "full_attention")


def _lfm3_type(index: int) -> str:
    """Returns a layer's default type: two convolutions between any two layers with attention."""
    if index % 4 == 2:
        return "full_attention"
    return "sliding_attention" if index % 4 == 0 and index else "conv"


def _checked(spec: ModelSpec, types: list[str], *known: str) -> list[str]:
    """Raises ModelLoadError: a type that is not `known` (by default, of `_KINDS`), or too few of them."""
    known = known or tuple(_KINDS)
    if len(types) < spec.num_layers or set(types) - set(known):
        raise ModelLoadError(
            f"config.json of {spec.name}: layer_types must name {' or '.join(known)} for each of {spec.num_layers} "
            f"layers, got {types}."
        )
    return types[: spec.num_layers]


def _feed_forward_size(config: Mapping[str, Any]) -> int:
    """Returns two thirds of the stated size times a factor, rounded up, unless config.json states the exact size."""
    stated = config.get("block_ff_dim", config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return stated
    adjusted, factor = int(2 * stated / 3), config["block_ffn_dim_multiplier"]
    if factor is None:
        return adjusted
    unit = config["block_multiple_of"]
    return -(-int(factor * adjusted) // unit) * unit
