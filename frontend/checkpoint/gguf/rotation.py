"""Rotary embeddings in a GGUF file's metadata, as `rope_parameters` of config.json."""

import math
import struct

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.fields import Config, Fields

_KINDS = ("linear", "none", "", "yarn", "longrope")


def make_rope(fields: Fields, head_dim: int | None = None) -> Config:
    """Builds `rope_parameters`. `head_dim` is the size of the part of a head with positions, if not the whole head.

    Raises:
        ConfigError: a scaling that is not supported, or an odd number of rotated elements, or more than a head has.
    """
    base = {"rope_theta": fields.get("rope.freq_base", 10_000.0)}
    rotated = fields.get("rope.dimension_count", fields.head_dim)
    head_dim = head_dim or fields.head_dim
    if not 0 < rotated <= head_dim or rotated % 2:
        raise ConfigError(
            f"{fields.path} is damaged: {fields.architecture}.rope.dimension_count is {rotated}, of heads of "
            f"{head_dim}. Download it again."
        )
    if rotated != head_dim:
        base["partial_rotary_factor"] = rotated / head_dim
    return {**base, **make_scaling(fields, rotated, has_factors=bool(fields.rope_factors))}


def make_scaling(fields: Fields, rotated: int, *, has_factors: bool) -> Config:
    """How the rotation of `rotated` numbers of a head is stretched: `rope_type`, and what that needs.

    As in llama.cpp, a factor without a type is linear, and `attn_factor` multiplies cosines and sines of any type.

    Args:
        has_factors: whether the file's factors for each frequency count.

    Raises:
        ConfigError: a scaling that is not supported.
    """
    kind = fields.get("rope.scaling.type", "linear")
    if kind not in _KINDS:
        raise ConfigError(f"{fields.path}: the rope scaling {kind!r} is not supported.")
    stated = fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))
    factor: float = 1.0 if kind in ("none", "") else stated or 1.0
    scale: float = fields.get("rope.scaling.attn_factor", 1.0)
    if has_factors:
        if kind == "yarn" and factor != 1:
            raise ConfigError(f"{fields.path}: YaRN beside factors of each frequency is not supported.")
        return _factors(fields, factor, scale)
    if kind == "yarn":
        return _yarn(fields, factor, scale)
    if kind == "longrope":
        raise ConfigError(f"{fields.path} asks for longrope, but lacks its tensors rope_factors_*.weight.")
    if scale != 1:
        return _same_for_all([factor] * (rotated // 2), scale)
    return {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn(fields: Fields, factor: float, scale: float) -> Config:
    settings = {
        "factor": factor,
        "original_max_position_embeddings": fields.get("rope.scaling.original_context_length"),
        "beta_fast": fields.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": fields.get("rope.scaling.yarn_beta_slow"),
    }
    if scale != 1:
        settings["attention_factor"] = scale * _temperature(factor)
    return {"rope_type": "yarn", **{name: value for name, value in settings.items() if value is not None}}


def with_temperatures(rope: Config, mscale: float, mscale_all_dim: float) -> Config:
    """YaRN with other temperatures (DeepSeek V2's) than that of its paper."""
    rope = {**rope, "mscale": mscale, "mscale_all_dim": mscale_all_dim}
    if "attention_factor" in rope:
        factor = rope["factor"]
        ratio = _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
        rope["attention_factor"] *= ratio / _temperature(factor)
    return rope


def _temperature(factor: float, weight: float = 1.0) -> float:
    """YaRN's (arXiv:2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _factors(fields: Fields, factor: float, scale: float) -> Config:
    """Factors for each frequency: one list (Llama 3.1 on), or those of LongRoPE for short and for long contexts."""
    lists = {
        name: [factor * each for each in struct.unpack(f"<{len(data) // 4}f", data)]
        for name, data in fields.rope_factors.items()
    }
    if (only := lists.get("rope_freqs.weight")) is not None:
        return _same_for_all(only, scale)
    return {
        "rope_type": "longrope",
        "short_factor": lists["rope_factors_short.weight"],
        "long_factor": lists["rope_factors_long.weight"],
        "original_max_position_embeddings": fields.need(
            "rope.scaling.original_context_length", fields.get("context_length")
        ),
        "attention_factor": scale,
    }


def _same_for_all(factors: list[float], scale: float) -> Config:
    """Factors for each frequency in contexts of any length."""
    return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": scale}
