"""What a GGUF file's metadata say of rotary embeddings, as `rope_parameters` of config.json."""

import struct

from quire.core.errors import ConfigError
from quire.frontend.checkpoint.gguf.fields import Config, Fields


def make_rope(fields: Fields, head_dim: int | None = None) -> Config:
    """`rope_parameters`; `head_dim` are the numbers of a head that are or are not rotated, if not all of its own.

    Raises:
        ConfigError: a scaling that is not supported, or an odd number of numbers, or more than a head has.
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
    kind, factor = fields.get("rope.scaling.type", "none"), fields.get("rope.scaling.factor", 1.0)
    original = fields.get("rope.scaling.original_context_length")
    if fields.rope_factors:
        return {**base, **_factors(fields)}
    match kind:
        case "linear":
            return {**base, "rope_type": "linear", "factor": factor}
        case "yarn":
            settings = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            for name, field in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                settings[name] = fields.get(f"rope.scaling.{field}")
            return {**base, **{name: value for name, value in settings.items() if value is not None}}
        case "none" | "":
            return {**base, "rope_type": "default"}
        case "longrope":
            raise ConfigError(f"{fields.path} asks for longrope, but lacks its tensors rope_factors_*.weight.")
    raise ConfigError(f"{fields.path}: the rope scaling {kind!r} is not supported.")


def _factors(fields: Fields) -> Config:
    """Factors for each frequency: one list (Llama 3.1 on), or those of LongRoPE for short and for long contexts."""
    lists = {name: list(struct.unpack(f"<{len(data) // 4}f", data)) for name, data in fields.rope_factors.items()}
    if (only := lists.get("rope_freqs.weight")) is not None:
        return {"rope_type": "longrope", "short_factor": only, "long_factor": only, "attention_factor": 1.0}
    return {
        "rope_type": "longrope",
        "short_factor": lists["rope_factors_short.weight"],
        "long_factor": lists["rope_factors_long.weight"],
        "original_max_position_embeddings": fields.need(
            "rope.scaling.original_context_length", fields.get("context_length")
        ),
        "attention_factor": fields.get("rope.scaling.attn_factor", 1.0),
    }
