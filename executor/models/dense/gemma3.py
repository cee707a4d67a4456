"""Gemma 3, text (arXiv:2503.19786): most layers see a window, every sixth sees all tokens."""

from collections.abc import Mapping
from typing import Any

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.attention.sequence import self_attention
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import Norm
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.models.blocks import ResidualLayer
from quire.executor.models.decoder import (
    Decoder,
    activation_of,
    attention_shape,
    layer_places,
    layer_windows,
    size_of,
    vocabulary_ends,
)
from quire.executor.models.dense.gemma2 import gemma_factor, gemma_norm
from quire.ops.backend import AttentionForm


class Gemma3ForCausalLM(Decoder):
    """Queries and keys are normalized; layers with a window rotate faster; norms store the weight minus 1."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        _refuse(spec)
        style = gemma_norm(spec)
        types = _layer_types(config, spec.num_layers)
        window = config["sliding_window"]
        if spec.is_encoder:  # config.json counts both sides
            window = window // 2 + 1
        windows = layer_windows(types, window, spec.num_layers)
        rotaries = {kind: RotaryEmbedding(context, gemma_rope(config, kind), spec.head_dim) for kind in set(types)}
        bias = config["attention_bias"]
        scale = config["query_pre_attn_scalar"] ** -0.5
        activation = activation_of(spec, "hidden_activation")
        ffn_size = size_of(spec, "intermediate_size")

        def layer(place: LayerPlace) -> ResidualLayer:
            def norm(name: str) -> Norm:
                return style.layer(context, f"{place.name}.{name}_layernorm", spec.hidden_size)

            attention = self_attention(
                context, place, attention_shape(spec), rotaries[types[place.index]], qkv_bias=bias, output_bias=bias,
                qk_norm=style, form=AttentionForm(scale, windows[place.index]),
            )  # fmt: skip
            mlp = GatedMLP(context, f"{place.name}.mlp", spec.hidden_size, ffn_size, activation)
            return ResidualLayer(
                context.ops, attention, mlp,
                before_attention=norm("input"), after_attention=norm("post_attention"),
                before_mlp=norm("pre_feedforward"), after_mlp=norm("post_feedforward"),
            )  # fmt: skip

        is_tied = config["tie_word_embeddings"]
        embed, head = vocabulary_ends(
            spec, context, is_tied=is_tied, scale=gemma_factor(spec, context),
            softcap=config.get("final_logit_softcapping"),
        )  # fmt: skip
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", spec.hidden_size), head)


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Returns `layer_types`, or for older checkpoints: every `sliding_window_pattern`-th layer sees all tokens."""
    types = config.get("layer_types")
    if types is not None:
        return types
    pattern = config.get("sliding_window_pattern", 6)
    return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(num_layers)]


def gemma_rope(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Returns `config` with one layer type's rotation in the fields that other models have for all layers."""
    older = {
        "sliding_attention": {"rope_theta": config["rope_local_base_freq"]},
        "full_attention": {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})},
    }
    by_kind = config.get("rope_parameters") or older
    if not isinstance(by_kind.get(kind), Mapping):
        raise ModelLoadError(f"config.json: rope_parameters must say how layers of {kind} rotate; it is {by_kind}.")
    return {**config, "rope_parameters": {**older[kind], **by_kind[kind]}}


def _refuse(spec: ModelSpec) -> None:
    """Refuses options of config.json that no text model of Gemma 3 uses.

    Raises:
        ModelLoadError: caps on scores, or attention to later tokens.
    """
    if spec.hf_config.get("use_bidirectional_attention") and not spec.is_encoder:
        raise ModelLoadError(
            f"{spec.name}: its tokens see later ones (use_bidirectional_attention), as for embeddings: it is no model "
            "that generates text. Set it to false if it is one."
        )
    if value := spec.hf_config.get("attn_logit_softcapping"):
        raise ModelLoadError(f"{spec.name}: attn_logit_softcapping {value!r} is not supported in {spec.architecture}.")
