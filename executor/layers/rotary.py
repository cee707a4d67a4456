"""Rotary position embeddings (arXiv:2104.09864) and the ways to stretch them over longer contexts."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext


class RotaryEmbedding:
    """Positions [num_tokens] → cosines and sines for `ops.rotary`, once a step for all layers."""

    def __init__(self, context: ModelContext, config: Mapping[str, Any], head_dim: int) -> None:
        """`config` is the checkpoint's config.json.

        Raises:
            ModelLoadError: an unknown or incomplete kind of scaling.
        """
        frequencies, self._scale = rotary_frequencies(config, head_dim, context.max_model_len)
        self._frequencies = frequencies.to(context.device)
        self._ops = context.ops
        self._dtype = context.dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, both [num_tokens, 1, rotary_dim]."""
        return self._ops.rotation(positions, self._frequencies, self._scale, self._dtype)


class Rotation(NamedTuple):
    """The parameters of a rotation: `settings` is the checkpoint's own block of them."""

    dim: int  # rotated dimensions of a head
    base: float
    max_positions: int  # the checkpoint's max_position_embeddings
    max_model_len: int
    settings: Mapping[str, Any]

    def need(self, name: str) -> float:
        value = self.settings.get(name)
        if not isinstance(value, (int, float)):
            raise ModelLoadError(f"config.json: the rope scaling {dict(self.settings)} lacks a number for {name!r}.")
        return value

    @property
    def original_max_positions(self) -> float:
        return self.settings.get("original_max_position_embeddings") or self.max_positions


def rotary_frequencies(config: Mapping[str, Any], head_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    """Radians per position [rotary_dim / 2] float32, and the factor that multiplies cosines and sines.

    Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).
    """
    settings = config.get("rope_parameters")
    if settings is None:
        settings = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _KINDS:
        raise ModelLoadError(f"config.json asks for rope type {kind!r}; known are {', '.join(_KINDS)}.")
    fraction = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    rotation = Rotation(
        dim=int(head_dim * fraction),
        base=settings.get("rope_theta", config.get("rope_theta", 10000.0)),
        max_positions=config["max_position_embeddings"],
        max_model_len=max_model_len,
        settings=settings,
    )
    return _KINDS[kind](rotation)


def _plain(dim: int, base: float) -> Tensor:
    """base^(-2i / dim)."""
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _default(rotation: Rotation) -> tuple[Tensor, float]:
    return _plain(rotation.dim, rotation.base), 1.0


def _linear(rotation: Rotation) -> tuple[Tensor, float]:
    """Position interpolation (arXiv:2306.15595)."""
    return _plain(rotation.dim, rotation.base) / rotation.need("factor"), 1.0


def _dynamic(rotation: Rotation) -> tuple[Tensor, float]:
    """NTK-aware scaling of the base (arXiv:2309.00071, appendix B.1).

    The base is scaled for `max_model_len`, not for the longest sequence so far: a request's tokens must not depend on
    its neighbours, and cached keys keep the rotation that they were written with.
    """
    factor, dim = rotation.need("factor"), rotation.dim
    length = max(rotation.max_model_len, rotation.max_positions)
    stretch = (factor * length / rotation.max_positions) - (factor - 1)
    return _plain(dim, rotation.base * stretch ** (dim / (dim - 2))), 1.0


def _llama3(rotation: Rotation) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between blended (arXiv:2407.21783)."""
    frequencies = _plain(rotation.dim, rotation.base)
    low, high = rotation.need("low_freq_factor"), rotation.need("high_freq_factor")
    turns = rotation.original_max_positions * frequencies / (2 * math.pi)  # full turns within the trained context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * keep + frequencies / rotation.need("factor") * (1 - keep), 1.0


def _yarn(rotation: Rotation) -> tuple[Tensor, float]:
    """YaRN: interpolation by parts and a temperature on the attention (arXiv:2309.00071)."""
    settings, dim = rotation.settings, rotation.dim
    original = rotation.original_max_positions
    factor = settings.get("factor") or rotation.max_positions / original

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rotation.base))

    low, high = dimension_of(settings.get("beta_fast") or 32), dimension_of(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    interpolate = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = _plain(dim, rotation.base)
    return frequencies * (1 - interpolate) + frequencies / factor * interpolate, _yarn_scale(settings, factor)


def _yarn_scale(settings: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if settings.get("attention_factor") is not None:
        return settings["attention_factor"]
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return scale(settings["mscale"]) / scale(settings["mscale_all_dim"])
    return scale(1.0)


_KINDS: dict[str, Callable[[Rotation], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
