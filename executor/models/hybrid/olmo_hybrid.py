"""OLMo Hybrid: Gated DeltaNets (arXiv:2412.06464) in most layers, the attention of OLMo 2 in the others."""

from collections.abc import Sequence
from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import Norm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.base import RecurrentLayer, within
from quire.executor.layers.recurrent.gated_delta import DeltaShape, GatedDeltaNet
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import SelfAttention, attention_shape, mlp_maker, norm_style, vocabulary_ends
from quire.executor.models.dense.olmo2 import Olmo2Attention
from quire.executor.models.hybrid_decoder import (
    Block,
    FeedForwardBlock,
    HybridDecoder,
    MixerBlock,
    layer_kinds,
    places_by_kind,
)
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard, Stored
from quire.executor.weights.rearranged import Piece, RearrangedWeights

_PIECES = {"linear_attn.norm": Piece("linear_attn.o_norm"), "linear_attn.out_proj": Piece("linear_attn.o_proj")}

_EPS = 1e-5
"""The eps of the norms after delta rules, which is not in config.json."""


class OlmoHybridForCausalLM(HybridDecoder):
    """Delta rules and the MLPs after them have norms before them; in attention layers, the outputs are normalized.

    Without a base for the rotation, nothing is rotated.
    """

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        context = replace(context, weights=RearrangedWeights(context.weights, _PIECES))
        config, mlp = spec.hf_config, mlp_maker(spec, context)
        kinds = layer_kinds(config.get("layer_types") or _default_types(spec.num_layers), spec)
        settings = config.get("rope_parameters") or config
        rotary = RotaryEmbedding(context, config, spec.head_dim) if settings.get("rope_theta") is not None else None
        bias = config["attention_bias"]

        def norm(name: str, *other_names: str) -> Norm:
            """Reads the norm under whichever of these names the checkpoint has."""
            found = [other for other in other_names if context.find(f"{other}.weight") is not None]
            return norm_style(spec).layer(context, found[0] if found else name, spec.hidden_size)

        mixers: list[SelfAttention | RecurrentLayer] = []
        blocks: list[Block] = []
        ends: list[int] = []
        for place in places_by_kind(context, kinds):
            name = place.name
            middle = norm(f"{name}.post_attention_layernorm", f"{name}.feedforward_layer_norm")
            if kinds[place.index] == "recurrent":
                delta = _delta_net(spec, context, place)
                first = norm(f"{name}.input_layernorm", f"{name}.attention_layer_norm")
                blocks += [MixerBlock(first, delta), FeedForwardBlock(middle, mlp(place))]
                mixers.append(delta)
            else:
                attention = Olmo2Attention(
                    context, place, attention_shape(spec), rotary, norm_style(spec), qkv_bias=bias, output_bias=bias
                )
                last = norm(f"{name}.post_feedforward_layernorm")
                blocks.append(ResidualLayer(context.ops, attention, mlp(place), after_attention=middle, after_mlp=last))
                mixers.append(attention)
            ends.append(len(blocks) - 1)
        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        super().__init__(embed, blocks, norm("model.norm"), head, mixers, ends=ends)


def _default_types(num_layers: int) -> list[str]:
    """Returns the default types: every fourth layer is attention, or else the last."""
    types = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(num_layers)]
    return types if num_layers > 3 else [*types[:-1], "full_attention"]


def _delta_net(spec: ModelSpec, context: ModelContext, place: LayerPlace) -> GatedDeltaNet:
    """Builds a delta rule, with a projection and a convolution for each of its inputs."""
    shape, name = _delta_shape(spec), f"{place.name}.linear_attn"
    heads = context.shard(0, shape.num_value_heads, "linear attention heads")
    keys = context.shard(0, shape.key_size, "linear attention keys")
    values = context.shard(0, shape.value_size, "linear attention values")
    sizes = (shape.key_size, shape.key_size, shape.value_size)
    parts = [
        *(
            LinearPart(f"{name}.{x}_proj", size, own)
            for x, size, own in zip("qkv", sizes, (keys, keys, values), strict=True)
        ),
        LinearPart(f"{name}.g_proj", shape.value_size, values),
        LinearPart(f"{name}.b_proj", shape.num_value_heads, heads),
        LinearPart(f"{name}.a_proj", shape.num_value_heads, heads),
    ]
    channels = [keys, within(keys, shape.key_size), within(values, 2 * shape.key_size)]
    stored = [
        (f"{name}.{x}_conv1d", _channels(context, f"{name}.{x}_conv1d.weight", size))
        for x, size in zip("qkv", sizes, strict=True)
    ]
    return GatedDeltaNet(
        context, place, shape, parts, _EPS, conv_parts=_overlaps(stored, channels),
        beta_scale=2.0 if spec.hf_config["linear_allow_neg_eigval"] else 1.0,
    )  # fmt: skip


def _delta_shape(spec: ModelSpec) -> DeltaShape:
    config = spec.hf_config
    key_heads = config.get("linear_num_key_heads") or spec.num_attention_heads
    key_dim = config.get("linear_key_head_dim") or int(0.75 * spec.hidden_size / key_heads)
    return DeltaShape(
        spec.hidden_size,
        key_heads,
        config.get("linear_num_value_heads") or spec.num_attention_heads,
        key_dim,
        config.get("linear_value_head_dim") or 2 * key_dim,
        config["linear_conv_kernel_dim"],
    )


def _channels(context: ModelContext, name: str, size: int) -> int:
    """Counts the channels of the convolution `name`. Transformers splits the three into equal parts."""
    found = context.find(name, Stored((size,), context.dtype))
    return size if found is None else found.shape[0]


def _overlaps(stored: Sequence[tuple[str, int]], wanted: Sequence[Shard]) -> list[LinearPart]:
    """Returns the parts of `stored` layers (name, rows) with the `wanted` rows, counted over all of them."""
    parts = []
    for shard in wanted:
        first = 0
        for name, size in stored:
            start, stop = max(shard.start - first, 0), min(shard.stop - first, size)
            if start < stop:
                parts.append(LinearPart(name, size, Shard(0, start, stop)))
            first += size
    return parts
