"""The DeepSeek family: multi-head latent attention (arXiv:2405.04434, 2412.19437)."""

import math
from collections.abc import Mapping
from typing import Any

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.latent_attention import LatentAttention, LatentShape
from quire.executor.layers.rotary import RotaryEmbedding
from quire.executor.models.decoder import PreNormDecoder


class YoutuForCausalLM(PreNormDecoder):
    """DeepSeek V3 without experts."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        super().__init__(spec, context, LatentAttentionMaker(spec, context))


class LatentAttentionMaker:
    """Builds the attention of each layer, as config.json describes it for DeepSeek V2 and its relatives."""

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        config = spec.hf_config
        self._context = context
        self._shape = latent_shape(spec)
        self._rotary = RotaryEmbedding(context, config, self._shape.rope_head_dim)
        self._scale = _temperature(config) ** 2 * self._shape.q_head_dim**-0.5
        self._bias = config.get("attention_bias", False)
        self._is_interleaved = config.get("rope_interleave", True)

    def __call__(self, place: LayerPlace) -> LatentAttention:
        return LatentAttention(
            self._context, place, self._shape, self._rotary, scale=self._scale, bias=self._bias,
            is_interleaved=self._is_interleaved,
        )  # fmt: skip


def latent_shape(spec: ModelSpec) -> LatentShape:
    """The sizes of latent attention in config.json.

    Raises:
        ModelLoadError: a size is missing.
    """
    config = spec.hf_config
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for name in names:
        if not isinstance(config.get(name), int):
            raise ModelLoadError(f"config.json of {spec.name} lacks {name!r}, a size of latent attention.")
    sizes = [config[name] for name in names]
    return LatentShape(spec.hidden_size, spec.num_attention_heads, config.get("q_lora_rank"), *sizes)


def _temperature(config: Mapping[str, Any]) -> float:
    """The factor of queries, and of keys, by which YaRN sharpens attention over a stretched context (arXiv:2309.00071).

    Only the part of it that `mscale_all_dim` asks for: it concerns all dimensions. Cosines and sines have the rest.
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight, factor = settings.get("mscale_all_dim") or 0.0, settings.get("factor") or 1.0
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
