"""Mamba (arXiv:2312.00752) and Falcon Mamba (arXiv:2410.05355): a state-space scan in every layer, and nothing else."""

import math
from dataclasses import replace
from typing import Literal

from quire.core.config.resolved import ModelSpec
from quire.executor.layers.context import ModelContext
from quire.executor.layers.norm import NormStyle, RMSNorm
from quire.executor.layers.recurrent.mamba import MambaMixer, MambaShape
from quire.executor.models.decoder import SettingError, size_of, vocabulary_ends
from quire.executor.models.hybrid_decoder import HybridDecoder, MixerBlock, places_by_kind
from quire.executor.weights.rearranged import RearrangedWeights


class MambaForCausalLM(HybridDecoder):
    """The residual stream has the model's type, also where `residual_in_fp32` asks for float32."""

    SIZES = ("state_size", "conv_kernel")
    PARAMETER_NORM: Literal["none", "plain"] = "none"

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config, size = spec.hf_config, spec.hidden_size
        activation = config["hidden_act"]
        if activation not in ("silu", "swish"):
            raise SettingError(
                f"{spec.name}: hidden_act {activation!r} is not supported in {spec.architecture}; only silu."
            )
        ends = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}
        stored = RearrangedWeights(context.weights, {}, layer="backbone.layers.{}", ends=ends)
        context = replace(context, weights=stored)
        norm, dt_rank = NormStyle(config["layer_norm_epsilon"]), config["time_step_rank"]
        shape = MambaShape(
            hidden_size=size, channels=config.get("intermediate_size") or int(config["expand"] * size),
            state_size=size_of(spec, "state_size"), dt_rank=math.ceil(size / 16) if dt_rank == "auto" else dt_rank,
            conv_width=size_of(spec, "conv_kernel"),
            conv_bias=config["use_conv_bias"], bias=config["use_bias"],
            parameter_norm=self.PARAMETER_NORM, norm_eps=config.get("mixer_rms_eps", 1e-6),
        )  # fmt: skip
        places = places_by_kind(context, ["recurrent"] * spec.num_layers)
        mixers = [MambaMixer(context, place, shape, f"{place.name}.mixer") for place in places]
        blocks = [
            MixerBlock(RMSNorm(context, f"{place.name}.norm", size, norm), mixer)
            for place, mixer in zip(places, mixers, strict=True)
        ]
        embed, head = vocabulary_ends(spec, context, is_tied=config["tie_word_embeddings"])
        super().__init__(embed, blocks, RMSNorm(context, "model.norm", size, norm), head, mixers)


class FalconMambaForCausalLM(MambaForCausalLM):
    """A token's dt, b and c are normalized, without weights."""

    PARAMETER_NORM = "plain"
