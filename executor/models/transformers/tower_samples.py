"""Small images for dry runs of towers: the arrays that a class reads, told by the names of its arguments."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

READER = "get_image_features"
"""The library's name for the method that makes the rows of images."""

_GRID = (4, 8)
"""Height and width in patches, where images may have any: multiples of the patches that are merged."""


def sample_images(module: nn.Module, config: Any) -> Iterator[Mapping[str, Tensor]]:
    """Yields forms of an image that `module`, with the method `READER`, may take; none for arguments that are unknown.

    Pixels are noise in float32.
    """
    names = inspect.signature(getattr(module, READER)).parameters
    vision = getattr(config, "vision_config", config)
    for name, make in _BY_ARGUMENT.items():
        if name in names:
            yield from make(vision)
            return
    if names.keys() & _UNKNOWN or "pixel_values" not in names:
        return
    for shape in _squares(vision):
        pixels = {"pixel_values": _noise(*shape)}
        yield pixels
        if "image_sizes" in names:
            yield {**pixels, "image_sizes": torch.tensor([shape[-2:]])}


def _grids_in_time(vision: Any) -> Iterator[Mapping[str, Tensor]]:
    times = _first(vision, "temporal_patch_size", default=1)
    channels, side = _first(vision, "in_channels", "num_channels", default=3), _first(vision, "patch_size", default=14)
    number = _GRID[0] * _GRID[1]
    for shape in ((channels * times * side**2,), (channels, side, side), (channels * side**2,)):
        yield {"pixel_values": _noise(number, *shape), "image_grid_thw": torch.tensor([[1, *_GRID]])}


def _grids(vision: Any) -> Iterator[Mapping[str, Tensor]]:
    size = _first(vision, "num_channels", default=3) * _first(vision, "patch_size", default=14) ** 2
    yield {"pixel_values": _noise(_GRID[0] * _GRID[1], size), "image_grid_hw": torch.tensor([[*_GRID]])}


def _squares(vision: Any) -> Iterator[tuple[int, ...]]:
    """Yields shapes of one tile and of two, as classes have them that cut images; first small ones, for classes that
    take any size.
    """
    small, channels = 4 * _first(vision, "patch_size", default=14), _first(vision, "num_channels", default=3)
    for side in dict.fromkeys((small, _first(vision, "image_size", default=small))):
        yield from ((*tiles, channels, side, side) for tiles in ((1,), (1, 1), (1, 2)))


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _first(config: Any, *names: str, default: int) -> int:
    value = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)
    return int(value[0] if isinstance(value, list | tuple) else value)


_BY_ARGUMENT: Mapping[str, Callable[[Any], Iterator[Mapping[str, Tensor]]]] = {
    "image_grid_thw": _grids_in_time,
    "image_grid_hw": _grids,
}
_UNKNOWN = {
    "spatial_shapes", "image_position_ids", "target_sizes", "high_res_pixel_values", "qformer_input_ids",
    "image_token_pooling", "image_attention_mask",
}  # fmt: skip
