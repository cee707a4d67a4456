"""Gemma (arXiv:2403.08295) and Gemma 2 (arXiv:2408.00118)."""

import torch

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.norm import Norm, NormStyle
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
from quire.ops.backend import AttentionForm


def gemma_norm(spec: ModelSpec) -> NormStyle:
    """Returns norms that store the weight minus 1."""
    return NormStyle(spec.hf_config["rms_norm_eps"], is_offset=True)


def gemma_factor(spec: ModelSpec, context: ModelContext) -> float:
    """Returns the factor of the embeddings, rounded to the weights' dtype, as if it were stored with them."""
    return torch.tensor(spec.hidden_size**0.5, dtype=context.dtype).item()


class GemmaForCausalLM(Decoder):
    """Llama with scaled embeddings, wide heads and the approximated GeGLU, which config.json may name differently."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, style = spec.hf_config, gemma_norm(spec)
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        bias = config["attention_bias"]
        ffn_size = size_of(spec, "intermediate_size")

        def layer(place: LayerPlace) -> ResidualLayer:
            def norm(name: str) -> Norm:
                return style.layer(context, f"{place.name}.{name}", spec.hidden_size)

            attention = Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias
            )  # fmt: skip
            mlp = GatedMLP(context, f"{place.name}.mlp", spec.hidden_size, ffn_size, "gelu_tanh")
            return ResidualLayer(
                context.ops, attention, mlp, before_attention=norm("input_layernorm"),
                before_mlp=norm("post_attention_layernorm"),
            )  # fmt: skip

        embed, head = vocabulary_ends(
            spec, context, is_tied=config["tie_word_embeddings"], scale=gemma_factor(spec, context)
        )
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", spec.hidden_size), head)


class Gemma2ForCausalLM(Decoder):
    """Each block is normalized on both sides, every other layer has a window, scores and logits are capped."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, style = spec.hf_config, gemma_norm(spec)
        types = config.get("layer_types") or ["sliding_attention", "full_attention"] * spec.num_layers
        windows = layer_windows(types, config["sliding_window"], spec.num_layers)
        rotary = RotaryEmbedding(context, config, spec.head_dim)
        form = AttentionForm(config["query_pre_attn_scalar"] ** -0.5, softcap=config["attn_logit_softcapping"])
        bias = config["attention_bias"]
        activation = activation_of(spec, "hidden_activation")
        ffn_size = size_of(spec, "intermediate_size")

        def layer(place: LayerPlace) -> ResidualLayer:
            def norm(name: str) -> Norm:
                return style.layer(context, f"{place.name}.{name}_layernorm", spec.hidden_size)

            attention = Attention(
                context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias,
                form=form._replace(window=windows[place.index]),
            )  # fmt: skip
            mlp = GatedMLP(context, f"{place.name}.mlp", spec.hidden_size, ffn_size, activation)
            return ResidualLayer(
                context.ops, attention, mlp,
                before_attention=norm("input"), after_attention=norm("post_attention"),
                before_mlp=norm("pre_feedforward"), after_mlp=norm("post_feedforward"),
            )  # fmt: skip

        embed, head = vocabulary_ends(
            spec, context, is_tied=config["tie_word_embeddings"], scale=gemma_factor(spec, context),
            softcap=config["final_logit_softcapping"],
        )  # fmt: skip
        layers = [layer(place) for place in layer_places(spec, context)]
        super().__init__(embed, layers, style.layer(context, "model.norm", spec.hidden_size), head)
