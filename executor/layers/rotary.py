"""Rotary position embeddings (arXiv:2104.09864) as a layer, and how config.json describes them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.layers.rotary_kinds import KINDS, Rotation


class RotaryEmbedding:
    """Positions [num_tokens] → cosines and sines for `ops.rotary`, once a step for all layers.

    Attributes:
        dim: rotated dimensions of a head.
        scale: multiplies cosines and sines.
    """

    def __init__(
        self, context: ModelContext, config: Mapping[str, Any], head_dim: int, *, layer_type: str | None = None
    ) -> None:
        """`config` is the checkpoint's config.json; `layer_type` as for `rotary_frequencies`.

        Raises:
            ModelLoadError: an unknown or incomplete kind of scaling.
        """
        frequencies, self.scale = rotary_frequencies(config, head_dim, context.max_model_len, layer_type)
        self.dim = 2 * len(frequencies)
        self._frequencies = frequencies.to(context.device)
        self._ops = context.ops
        self._dtype = context.dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, both [num_tokens, 1, rotary_dim]."""
        return self._ops.rotation(positions, self._frequencies, self.scale, self._dtype)


def rotary_frequencies(
    config: Mapping[str, Any], head_dim: int, max_model_len: int, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Radians per position [rotary_dim / 2] float32, and the factor that multiplies cosines and sines.

    Reads `rope_parameters` (transformers 5), or those of `layer_type` where config.json has them by type of layer, or
    `rope_theta` with `rope_scaling` (before).
    """
    settings = _settings(config, layer_type)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in KINDS:
        raise ModelLoadError(f"config.json asks for rope type {kind!r}; known are {', '.join(KINDS)}.")
    _check_dual_chunks(config, max_model_len)
    fraction = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)))
    rotation = Rotation(
        dim=settings.get("rope_dim") or int(head_dim * fraction),
        head_dim=head_dim,
        base=settings.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0))),
        max_positions=config.get("max_position_embeddings") or max_model_len,
        max_model_len=max_model_len,
        original=config.get("original_max_position_embeddings"),
        settings=settings,
    )
    return KINDS[kind](rotation)


def _settings(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    settings = config.get("rope_parameters")
    if not settings:
        return config.get("rope_scaling") or {}
    if not any(isinstance(value, Mapping) for value in settings.values()):
        return settings
    own = settings.get(layer_type)
    if not isinstance(own, Mapping):
        raise ModelLoadError(f"config.json: rope_parameters must say how layers of {layer_type} rotate: {settings}.")
    return own


def _check_dual_chunks(config: Mapping[str, Any], max_model_len: int) -> None:
    """Dual chunk attention (arXiv:2402.17463) changes nothing within its first chunk; no further is supported."""
    dual = config.get("dual_chunk_attention_config")
    if not dual:
        return
    length = dual["chunk_size"] - dual["local_size"]
    if max_model_len > length:
        raise ModelLoadError(
            f"config.json: dual_chunk_attention_config is not supported beyond its first chunk of {length} tokens. "
            f"Serve with --max-model-len {length} or less."
        )
