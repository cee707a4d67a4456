"""Nemotron-H (arXiv:2504.03624): a layer is a Mamba 2 mixer, attention, or a feed-forward network."""

import math
from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mamba2 import Mamba2Mixer, Mamba2Shape
from quire.executor.layers.mlp import MLP
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.recurrent import RecurrentLayer
from quire.executor.models.decoder import activation_of, attention_shape, size_of, vocabulary_ends
from quire.executor.models.hybrid import (
    Block,
    FeedForwardBlock,
    HybridDecoder,
    MixerBlock,
    layer_kinds,
    places_by_kind,
)
from quire.executor.weights.rearranged import Piece, RearrangedWeights

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


class NemotronHForCausalLM(HybridDecoder):
    """No positions are encoded; one norm a layer. The residual stream has the model's type."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        kinds, norm = layer_kinds(_layer_types(spec), spec), NormStyle(config.get("layer_norm_epsilon", 1e-5))
        pieces = {f"self_attn.{part}_proj": Piece(f"mixer.{part}_proj") for part in "qkvo"}
        ends = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}
        stored = RearrangedWeights(context.weights, pieces, layer="backbone.layers.{}", ends=ends)
        context = replace(context, weights=stored)
        shape = _mamba2_shape(spec, norm.eps)

        def block(place: LayerPlace) -> Block:
            before, name = RMSNorm(context, f"{place.name}.norm", size, norm), f"{place.name}.mixer"
            match kinds[place.index]:
                case "feed_forward":
                    activation, bias = activation_of(spec, "mlp_hidden_act"), config.get("mlp_bias", False)
                    intermediate = size_of(spec, "intermediate_size")
                    return FeedForwardBlock(before, MLP(context, name, size, intermediate, activation, bias=bias))
                case "attention":
                    mixers.append(Attention(context, place, attention_shape(spec), None))
                case "recurrent":
                    mixers.append(Mamba2Mixer(context, place, shape, name))
            return MixerBlock(before, mixers[-1])

        mixers: list[Attention | RecurrentLayer] = []
        blocks = [block(place) for place in places_by_kind(context, kinds)]
        embed, head = vocabulary_ends(spec, context, is_tied=config.get("tie_word_embeddings", False))
        super().__init__(embed, blocks, RMSNorm(context, "model.norm", size, norm), head, mixers)


def _mamba2_shape(spec: ModelSpec, norm_eps: float) -> Mamba2Shape:
    config = spec.hf_config
    bias = config.get("use_bias", False)
    return Mamba2Shape(
        spec.hidden_size, num_heads=size_of(spec, "mamba_num_heads"), head_dim=size_of(spec, "mamba_head_dim"),
        num_groups=size_of(spec, "n_groups"), state_size=size_of(spec, "ssm_state_size"),
        conv_width=size_of(spec, "conv_kernel"), norm_eps=norm_eps, conv_bias=config.get("use_conv_bias", True),
        bias=bias, output_bias=bias, dt_limit=(config.get("time_step_min", 0.001), math.inf),
    )  # fmt: skip


def _layer_types(spec: ModelSpec) -> list[str]:
    """Each layer's type, by its name or by its letter in `hybrid_override_pattern`.

    Raises:
        ModelLoadError: mixtures of experts.
    """
    config = spec.hf_config
    types = config.get("layers_block_type") or config.get("layer_types")
    if types is None:
        types = [_PATTERN.get(letter, letter) for letter in config.get("hybrid_override_pattern", "")]
    if "moe" in types:
        raise ModelLoadError(
            f"{spec.name}: experts without gates are not supported in {spec.architecture}; only layers of type mamba, "
            "attention and mlp."
        )
    return types
