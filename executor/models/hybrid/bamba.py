"""Bamba: most layers are Mamba 2 mixers, some are attention; each is followed by a feed-forward network."""

from typing import Any

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import Attention, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.mlp import GatedMLP
from quire.executor.layers.positions.rotary import RotaryEmbedding
from quire.executor.layers.recurrent.mamba2 import Mamba2Mixer, Mamba2Shape
from quire.executor.models.decoder import activation_of, attention_shape, norm_style, vocabulary_ends
from quire.executor.models.hybrid_decoder import LayerKind, PairedDecoder, places_by_kind


class BambaForCausalLM(PairedDecoder):
    """Half of each head is rotated."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, shape = spec.hf_config, mamba2_shape(spec)
        rotary = RotaryEmbedding(context, {"partial_rotary_factor": 0.5, **config}, spec.head_dim)
        bias, activation = config["attention_bias"], activation_of(spec, "hidden_act")

        def mixer(place: LayerPlace) -> Attention | Mamba2Mixer:
            if kinds[place.index] == "recurrent":
                return Mamba2Mixer(context, place, shape, f"{place.name}.mamba")
            return Attention(context, place, attention_shape(spec), rotary, qkv_bias=bias, output_bias=bias)

        def mlp(place: LayerPlace) -> GatedMLP:
            return GatedMLP(
                context, f"{place.name}.feed_forward", spec.hidden_size, config["intermediate_size"], activation,
                bias=config.get("mlp_bias", False),
            )  # fmt: skip

        attention = config.get("attn_layer_indices") or []
        kinds: list[LayerKind] = [
            "attention" if index in attention else "recurrent" for index in range(spec.num_layers)
        ]
        super().__init__(
            spec, context, places_by_kind(context, kinds), mixer, mlp,
            vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"]),
            norm_names=("input_layernorm", "pre_ff_layernorm"), final_norm="final_layernorm",
        )  # fmt: skip


def mamba2_shape(spec: ModelSpec, **differences: Any) -> Mamba2Shape:
    """The shape of the mixers in config.json's `mamba_` fields; `differences` are the family's own.

    Raises:
        ModelLoadError: heads whose sizes do not make up the mixers' outputs.
    """
    config: dict[str, Any] = spec.hf_config
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * spec.hidden_size
    num_heads, head_dim = config["mamba_n_heads"], config["mamba_d_head"]
    if head_dim == "auto":
        head_dim = inner // num_heads
    if num_heads * head_dim != inner:
        raise ModelLoadError(
            f"config.json: mamba_n_heads ({num_heads}) times mamba_d_head ({head_dim}) must be the {inner} outputs of "
            "a mixer."
        )
    low, high = (_number(limit) for limit in config.get("time_step_limit") or (0.0, "inf"))
    shape: dict[str, Any] = {
        "hidden_size": spec.hidden_size, "num_heads": num_heads, "head_dim": head_dim,
        "num_groups": config["mamba_n_groups"], "state_size": config["mamba_d_state"],
        "conv_width": config["mamba_d_conv"], "norm_eps": norm_style(spec).eps,
        "conv_bias": config["mamba_conv_bias"], "bias": config["mamba_proj_bias"],
        "output_bias": config["mamba_proj_bias"], "dt_limit": (low, high),
    }  # fmt: skip
    return Mamba2Shape(**{**shape, **differences})


def _number(value: Any) -> float:
    """Parses a number of config.json, where infinity is a string, or `{"__float__": "Infinity"}` (transformers 5)."""
    return float(value["__float__"] if isinstance(value, dict) else value)
