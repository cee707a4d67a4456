"""Rotary position embeddings (arXiv:2104.09864) as a layer, and their description in config.json."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.layers.positions.rotary_kinds import KINDS, Rotation


class RotaryEmbedding:
    """Maps positions [num_tokens] to cosines and sines for `ops.rotary`, once a step for all layers.

    Attributes:
        has_axes: places in time, height and width may stand for positions: [3, num_tokens].
        dim: rotated dimensions of a head.
        scale: multiplies cosines and sines.
    """

    def __init__(
        self,
        context: ModelContext,
        config: Mapping[str, Any],
        head_dim: int,
        *,
        layer_type: str | None = None,
        map_positions: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Takes the checkpoint's config.json as `config`; `layer_type` as for `rotary_frequencies`.

        `map_positions` changes the positions of the rotation; None: unchanged, without dual chunks.

        Raises:
            ModelLoadError: an unknown or incomplete kind of scaling, or dual chunks that would be needed.
        """
        if map_positions is None:
            check_first_chunk(config, context.max_model_len)
        self._map_positions = map_positions
        frequencies, self.scale = rotary_frequencies(config, head_dim, context.max_model_len, layer_type)
        self.dim = 2 * len(frequencies)
        axes = rotary_axes(_settings(config, layer_type), len(frequencies))
        self.has_axes = axes is not None
        self._axes = None if axes is None else axes.repeat(2).view(1, 1, 1, -1).to(context.device)
        self._frequencies = frequencies.to(context.device)
        self._ops = context.ops
        self._dtype = context.dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and signed sines, both [num_tokens, 1, rotary_dim]."""
        if self._map_positions is not None:
            positions = self._map_positions(positions)
        if positions.dim() == 1:
            return self._ops.rotation(positions, self._frequencies, self.scale, self._dtype)
        assert self._axes is not None
        index = self._axes.expand(1, positions.shape[1], 1, -1)
        cos, sin = self._ops.rotation(positions.flatten().contiguous(), self._frequencies, self.scale, self._dtype)
        cos, sin = (each.unflatten(0, positions.shape).gather(0, index)[0] for each in (cos, sin))
        return cos, sin


def rotary_axes(settings: Mapping[str, Any], num_frequencies: int) -> Tensor | None:
    """Returns the axis of each frequency: 0 is time, 1 height, 2 width. None: all follow one position.

    The axes have `mrope_section` frequencies: side by side, or with `mrope_interleaved` in turns, after which the rest
    is of time (Qwen2-VL, arXiv:2409.12191; Qwen3-VL).
    """
    sections = settings.get("mrope_section")
    if not sections:
        return None
    axes = torch.zeros(num_frequencies, dtype=torch.int64)
    first = 0
    for axis, count in enumerate(sections):
        if settings.get("mrope_interleaved"):
            axes[slice(axis, 3 * count, 3) if axis else slice(0, 0)] = axis
        else:
            axes[first : first + count] = axis
        first += count
    return axes


def rotary_frequencies(
    config: Mapping[str, Any], head_dim: int, max_model_len: int, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Returns radians per position [rotary_dim / 2] float32, and the factor that multiplies cosines and sines.

    Reads `rope_parameters` (transformers 5), or those of `layer_type` where config.json has them by type of layer, or
    `rope_theta` with `rope_scaling` (before).
    """
    settings = _settings(config, layer_type)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in KINDS:
        raise ModelLoadError(f"config.json asks for rope type {kind!r}; known are {', '.join(KINDS)}.")
    fraction = _stated((settings, config), ("partial_rotary_factor", "rotary_pct"), 1.0)
    rotation = Rotation(
        dim=settings.get("rope_dim") or int(head_dim * fraction),
        head_dim=head_dim,
        base=_stated((settings, config), ("rope_theta", "rotary_emb_base"), 10000.0),
        max_positions=config.get("max_position_embeddings") or max_model_len,
        max_model_len=max_model_len,
        original=config.get("original_max_position_embeddings"),
        settings=settings,
    )
    return KINDS[kind](rotation)


def _stated(blocks: Sequence[Mapping[str, Any]], names: Sequence[str], default: float) -> float:
    """Returns the first number under one of `names`; null counts as missing."""
    values = (block.get(name) for name in names for block in blocks)
    return next((value for value in values if value is not None), default)


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


class DualChunks(NamedTuple):
    """The chunks of dual chunk attention (arXiv:2402.17463), see `quire.executor.layers.attention.dual_chunk`.

    Attributes:
        length: tokens of a chunk.
        most: the farthest position of a query towards keys of other chunks, the first of which is at 0.
        trained: tokens of a sequence beyond which attention is sharpened.
    """

    length: int
    most: int
    trained: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "DualChunks | None":
        """Reads config.json, with vLLM's defaults."""
        dual = config.get("dual_chunk_attention_config")
        if not dual:
            return None
        size, local = dual.get("chunk_size", 8192), dual.get("local_size", 1024)
        return cls(size - local, size, dual.get("original_max_position_embeddings") or math.inf)

    @property
    def plain_length(self) -> int:
        """The most tokens of a sequence whose attention is the same without chunks."""
        return int(min(self.length, self.trained))

    def sharpen(self, q: Tensor, positions: Tensor) -> Tensor:
        """Multiplies `q` [num_tokens, num_heads, head_dim] by YaRN's temperature (arXiv:2309.00071) for the sequence's
        length.

        The length is counted up to the token, so that a token does not depend on those that follow.
        """
        stretch = (positions + 1).float() / self.trained
        temperature = (0.1 * stretch.log() + 1).clamp(min=1).square()
        return (q * temperature.view(-1, 1, 1)).to(q.dtype)


def check_first_chunk(config: Mapping[str, Any], max_model_len: int) -> None:
    """Checks that dual chunk attention changes nothing, for models without it: no sequence exceeds the first chunk.

    Raises:
        ModelLoadError: sequences may be longer.
    """
    chunks = DualChunks.of(config)
    if chunks is not None and max_model_len > chunks.plain_length:
        raise ModelLoadError(
            "config.json: this model is served without its dual_chunk_attention_config, which makes no difference to "
            f"sequences of {chunks.plain_length} tokens. Serve with --max-model-len {chunks.plain_length} or less."
        )
