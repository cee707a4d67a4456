"""Mamba 2 (arXiv:2405.21060): a state-space scan in every layer, and nothing else."""

from dataclasses import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.recurrent.mamba2 import Mamba2Mixer, Mamba2Shape
from quire.executor.models.decoder import SettingError, vocabulary_ends
from quire.executor.models.hybrid_decoder import HybridDecoder, MixerBlock, places_by_kind
from quire.executor.weights.rearranged import RearrangedWeights


class Mamba2ForCausalLM(HybridDecoder):
    """The residual stream has the model's type, also where `residual_in_fp32` asks for float32."""

    SIZES = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        _refuse(spec)
        ends = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}
        context = replace(
            context, weights=RearrangedWeights(context.weights, {}, layer="backbone.layers.{}", ends=ends)
        )
        norm = NormStyle(config["layer_norm_epsilon"])
        shape = Mamba2Shape(
            hidden_size=size, num_heads=config["num_heads"], head_dim=config["head_dim"],
            num_groups=config["n_groups"], state_size=config["state_size"], conv_width=config["conv_kernel"],
            norm_eps=norm.eps, conv_bias=config["use_conv_bias"], bias=config["use_bias"],
            output_bias=config["use_bias"], dt_limit=_limits(spec),
        )  # fmt: skip
        places = places_by_kind(context, ["recurrent"] * spec.num_layers)
        mixers = [Mamba2Mixer(context, place, shape, f"{place.name}.mixer") for place in places]
        blocks = [
            MixerBlock(RMSNorm(context, f"{place.name}.norm", size, norm), mixer)
            for place, mixer in zip(places, mixers, strict=True)
        ]
        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        super().__init__(embed, blocks, RMSNorm(context, "model.norm", size, norm), head, mixers)


def _limits(spec: ModelSpec) -> tuple[float, float]:
    """Returns the least and the largest time step; infinity may be written as `{"__float__": "Infinity"}`."""
    stored = spec.hf_config["time_step_limit"]
    low, high = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in stored)
    return low, high


def _refuse(spec: ModelSpec) -> None:
    """Refuses options of config.json that no checkpoint uses.

    Raises:
        SettingError: another activation than SiLU.
    """
    activation = spec.hf_config["hidden_act"]
    if activation not in ("silu", "swish"):
        raise SettingError(
            f"{spec.name}: hidden_act {activation!r} is not supported in {spec.architecture}; only silu."
        )
