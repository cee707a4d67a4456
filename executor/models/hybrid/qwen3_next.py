"""Qwen3-Next and Qwen3.5, text: three of four layers are Gated DeltaNets, the fourth is attention with a gate."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.base import parts_of, within
from quire.executor.layers.recurrent.gated_delta import DeltaShape, GatedDeltaNet
from quire.executor.models.decoder import MLPMaker, attention_shape, mlp_maker, vocabulary_ends
from quire.executor.models.hybrid_decoder import PairedDecoder, layer_kinds, places_by_kind
from quire.executor.models.mixtures.qwen2_moe import mixture_maker, sparse_mlps
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.quantization.schemes import is_gguf
from quire.executor.weights.readers import Shard


class _Qwen3NextDecoder(PairedDecoder):
    """Norms store the weight minus 1, except the one after a delta rule."""

    def __init__(
        self,
        spec: ModelSpec,
        context: ModelContext,
        shape: DeltaShape,
        delta_parts: Callable[[ModelContext, str, DeltaShape], list[LinearPart]],
        make_mlp: MLPMaker,
        rope: Mapping[str, Any] = {},
    ) -> None:
        """Takes as `rope` what replaces the rotation of config.json."""
        config, kinds = spec.hf_config, layer_kinds(_layer_types(spec), spec)
        norm = NormStyle(config["rms_norm_eps"], is_offset=True)
        rotary = RotaryEmbedding(context, {"partial_rotary_factor": 0.25, **config, **rope}, spec.head_dim)
        bias = config["attention_bias"]

        def mixer(place: LayerPlace) -> Attention | GatedDeltaNet:
            if kinds[place.index] == "recurrent":
                parts = delta_parts(context, f"{place.name}.linear_attn", shape)
                return GatedDeltaNet(context, place, shape, parts, norm.eps)
            return Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias, qk_norm=norm,
                is_gated=True,
            )  # fmt: skip

        ends = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        super().__init__(spec, context, places_by_kind(context, kinds), mixer, make_mlp, ends, norm=norm)


class Qwen3_5ForCausalLM(_Qwen3NextDecoder):
    """Dense, with one projection for each input of a delta rule."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        super().__init__(
            spec, context, _shape_of_qwen3_5(spec), parts_one_by_one, mlp_maker(spec, context), _rope(spec)
        )


class Qwen3_5MoeForCausalLM(_Qwen3NextDecoder):
    """Qwen3.5 with mixtures of experts as in Qwen2-MoE; the weights of the routed ones sum to 1."""

    SIZES = ("max_position_embeddings",)

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        make_mlp = mixture_maker(spec, context, renormalize=True)
        super().__init__(spec, context, _shape_of_qwen3_5(spec), parts_one_by_one, make_mlp, _rope(spec))


class Qwen3NextForCausalLM(_Qwen3NextDecoder):
    """Two projections for the inputs of a delta rule, each ordered by key head; mixtures of experts as in Qwen2-MoE."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        make_mlp = sparse_mlps(spec, context, mixture_maker(spec, context))
        super().__init__(spec, context, delta_shape(spec), _parts_by_key_head, make_mlp)


def parts_one_by_one(context: ModelContext, name: str, shape: DeltaShape) -> list[LinearPart]:
    """Returns queries, keys and values from one projection, and gates, b and a from one each."""
    heads = shape.of_value_heads(context, 1)
    return [
        *_mixed_and_gates(context, name, shape),
        *parts_of(f"{name}.in_proj_b", heads, shape.num_value_heads),
        *parts_of(f"{name}.in_proj_a", heads, shape.num_value_heads),
    ]


def _parts_by_key_head(context: ModelContext, name: str, shape: DeltaShape) -> list[LinearPart]:
    """Returns each key head's queries, keys, values and gates from one projection, its b and a from another."""
    own = context.shard(0, shape.num_key_heads, "linear attention heads")
    per_key = shape.num_value_heads // shape.num_key_heads
    values = per_key * shape.value_dim

    def by_head(projection: str, sizes: tuple[int, ...]) -> list[LinearPart]:
        """Lists the first of `sizes` rows of all heads, then the second, and so on."""
        total, shards = sum(sizes), []
        for place, size in enumerate(sizes):
            starts = [head * total + sum(sizes[:place]) for head in range(own.start, own.stop)]
            shards += [Shard(0, start, start + size) for start in starts]
        return parts_of(f"{name}.{projection}", shards, shape.num_key_heads * total)

    b_and_a = by_head("in_proj_ba", (per_key, per_key))
    if context.find(f"{name}.in_proj_qkv.weight") is not None:  # as newer GGUF files have it
        return [*_mixed_and_gates(context, name, shape), *b_and_a]
    return [*by_head("in_proj_qkvz", (shape.key_dim, shape.key_dim, values, values)), *b_and_a]


def _mixed_and_gates(context: ModelContext, name: str, shape: DeltaShape) -> list[LinearPart]:
    """Returns queries, keys and values from one projection, gates from another."""
    keys = context.shard(0, shape.key_size, "linear attention keys")
    values = shape.of_value_heads(context, shape.value_dim, offset=2 * shape.key_size)
    gates = shape.of_value_heads(context, shape.value_dim)
    return [
        *parts_of(
            f"{name}.in_proj_qkv", [keys, within(keys, shape.key_size), *values], 2 * shape.key_size + shape.value_size
        ),
        *parts_of(f"{name}.in_proj_z", gates, shape.value_size),
    ]


def delta_shape(spec: ModelSpec) -> DeltaShape:
    """Reads the sizes of a model's delta rules.

    Raises:
        ModelLoadError: value heads cannot be divided among key heads.
    """
    config: dict[str, Any] = spec.hf_config
    shape = DeltaShape(
        spec.hidden_size,
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        config["linear_conv_kernel_dim"],
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise ModelLoadError(
            f"config.json: linear_num_value_heads ({shape.num_value_heads}) must be a multiple of "
            f"linear_num_key_heads ({shape.num_key_heads})."
        )
    return shape


def _shape_of_qwen3_5(spec: ModelSpec) -> DeltaShape:
    """Reads the sizes; llama.cpp's converter changes the order of value heads."""
    return replace(delta_shape(spec), is_tiled=is_gguf(spec))


def _rope(spec: ModelSpec) -> dict[str, Any]:
    """Returns the rotation of Qwen3.5 in time, height and width."""
    stated = spec.hf_config.get("rope_parameters") or spec.hf_config.get("rope_scaling") or {}
    return {"rope_parameters": {"mrope_section": [11, 11, 10], **stated, "mrope_interleaved": True}}


def _layer_types(spec: ModelSpec) -> list[str]:
    """Returns `layer_types`, or for older checkpoints: every fourth layer is attention."""
    types, interval = spec.hf_config.get("layer_types"), spec.hf_config.get("full_attention_interval", 4)
    if types is not None:
        return types
    return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(spec.num_layers)]
