"""The kinds of rotary embeddings: frequencies by dimension, and their scaling for longer contexts.

A kind that depends on the length of a sequence is computed for `max_model_len`, not for the longest sequence so far. A
request's tokens must not depend on its neighbours, and cached keys keep the rotation that they were written with.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError

logger = logging.getLogger(__name__)


class Rotation(NamedTuple):
    """The parameters of a rotation.

    Attributes:
        dim: rotated dimensions of a head of `head_dim`.
        max_positions: the checkpoint's max_position_embeddings.
        original: tokens of the context before it was stretched, if config.json says so outside of `settings`.
        settings: the checkpoint's own block of parameters.
    """

    dim: int
    head_dim: int
    base: float
    max_positions: int
    max_model_len: int
    original: float | None
    settings: Mapping[str, Any]

    def need(self, name: str) -> float:
        """Returns a number that the kind requires.

        Raises:
            ModelLoadError: it is missing.
        """
        value = self.settings.get(name)
        if not isinstance(value, (int, float)):
            raise ModelLoadError(f"config.json: the rope scaling {dict(self.settings)} lacks a number for {name!r}.")
        return value

    @property
    def original_max_positions(self) -> float:
        """Tokens of the context before it was stretched."""
        return self.original or self.settings.get("original_max_position_embeddings") or self.max_positions

    @property
    def stretch(self) -> float:
        """The factor by which the context was stretched."""
        return self.settings.get("factor") or self.max_positions / self.original_max_positions


def _plain(dim: int, base: float) -> Tensor:
    """Computes base^(-2i / dim)."""
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _default(rotation: Rotation) -> tuple[Tensor, float]:
    return _plain(rotation.dim, rotation.base), 1.0


def _linear(rotation: Rotation) -> tuple[Tensor, float]:
    """Scales by position interpolation (arXiv:2306.15595)."""
    return _plain(rotation.dim, rotation.base) / rotation.need("factor"), 1.0


def _proportional(rotation: Rotation) -> tuple[Tensor, float]:
    """Computes pairs over the whole head, and rotates only the first `dim` dimensions (Gemma 4)."""
    frequencies = torch.zeros(rotation.head_dim // 2)
    count = rotation.dim // 2
    frequencies[:count] = _plain(rotation.head_dim, rotation.base)[:count]
    return frequencies / rotation.settings.get("factor", 1.0), 1.0


def _dynamic(rotation: Rotation) -> tuple[Tensor, float]:
    """Scales the base by NTK (arXiv:2309.00071, appendix B.1), for a length, or by a given `alpha`."""
    dim, alpha = rotation.dim, rotation.settings.get("alpha")
    if not alpha:
        factor = rotation.need("factor")
        trained = rotation.settings.get("max_trained_positions") or rotation.max_positions
        alpha = factor * max(rotation.max_model_len, trained) / trained - (factor - 1)
    return _plain(dim, rotation.base * alpha ** (dim / (dim - 2))), 1.0


def _ntk(rotation: Rotation) -> tuple[Tensor, float]:
    """Scales by NTK with a fixed factor, or mixed over the dimensions by `mixed_b` (https://kexue.fm/archives/9706)."""
    dim, factor, power = rotation.dim, rotation.need("factor"), rotation.settings.get("mixed_b")
    if power is None:
        return _plain(dim, rotation.base * factor) / factor ** (2 / dim), 1.0
    exponents = math.log(factor) * (torch.arange(1, dim // 2 + 1).float() / (dim // 2)) ** power
    return _plain(dim, rotation.base) / exponents.exp(), 1.0


def _llama3(rotation: Rotation) -> tuple[Tensor, float]:
    """Scales as Llama 3.1: interpolates long wavelengths, keeps short ones, blends those between (arXiv:2407.21783)."""
    frequencies = _plain(rotation.dim, rotation.base)
    low, high = rotation.need("low_freq_factor"), rotation.need("high_freq_factor")
    turns = rotation.original_max_positions * frequencies / (2 * math.pi)  # full turns within the trained context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * keep + frequencies / rotation.need("factor") * (1 - keep), 1.0


def _yarn(rotation: Rotation) -> tuple[Tensor, float]:
    """Scales by YaRN: interpolation by parts and a temperature on the attention (arXiv:2309.00071)."""
    settings, dim, original = rotation.settings, rotation.dim, rotation.original_max_positions

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rotation.base))

    low, high = dimension_of(settings.get("beta_fast") or 32), dimension_of(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    interpolate = ((torch.arange(dim // 2).float() - low) / (high - low or 0.001)).clamp(0, 1)
    frequencies = _plain(dim, rotation.base)
    return (
        frequencies * (1 - interpolate) + frequencies / rotation.stretch * interpolate,
        _yarn_scale(settings, rotation.stretch),
    )


def _yarn_scale(settings: Mapping[str, Any], factor: float) -> float:
    if settings.get("attention_factor") is not None:
        return settings["attention_factor"]
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return yarn_mscale(factor, settings["mscale"]) / yarn_mscale(factor, settings["mscale_all_dim"])
    return yarn_mscale(factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Computes YaRN's temperature for a context that is `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(rotation: Rotation) -> tuple[Tensor, float]:
    """Scales by LongRoPE (arXiv:2402.13753): a factor for each dimension, one list for short and one for long contexts.

    As in vLLM, all requests have the long factors if `max_model_len` exceeds the original context.
    """
    settings, original = rotation.settings, rotation.original_max_positions
    which = "long" if rotation.max_model_len > original else "short"
    factors = settings.get(f"{which}_factor")
    if not isinstance(factors, list) or len(factors) != rotation.dim // 2:
        raise ModelLoadError(f"config.json: {which}_factor of the rope scaling must list {rotation.dim // 2} numbers.")
    if which == "long":
        logger.info(
            "rotary embeddings have the factors for long contexts; --max-model-len %d has those for short ones",
            int(original),
        )
    factor = rotation.stretch
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    given = settings.get(f"{which}_mscale") or settings.get("attention_factor")
    return _plain(rotation.dim, rotation.base) / torch.tensor(factors), given or scale


KINDS: dict[str, Callable[[Rotation], tuple[Tensor, float]]] = {
    "default": _default,
    "mrope": _default,  # for text, whose positions are the same in all dimensions
    "linear": _linear,
    "dynamic": _dynamic,
    "xdrope": _dynamic,  # for text
    "ntk": _ntk,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "proportional": _proportional,
}
"""The function of each `rope_type` (or `type`) in config.json."""
