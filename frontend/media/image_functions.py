"""The functions of torchvision that the library's processors of videos and images call, for hosts without it.

torchvision must fit the build of torch to the letter: the one on PyPI does not load beside a build for CPUs. What the
processors take of it is a few lines on tensors [..., channels, height, width], whose results are the same here.
"""

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from PIL import Image

NAMES = (
    *("InterpolationMode", "crop", "grayscale_to_rgb", "normalize", "pad", "pil_to_tensor", "resize"),
    *("rgb_to_grayscale", "to_dtype"),
)
_GREY = (0.2989, 0.587, 0.114)
"""Shares of red, green and blue."""


class InterpolationMode(Enum):
    """How values between pixels are found; the names are those of Pillow."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(
    image: Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    antialias: bool | None = True,
) -> Tensor:
    """Resizes to `size`, (height, width). Bytes stay bytes."""
    smooth = interpolation in (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    is_taken = flat.dtype in (torch.float32, torch.float64, torch.uint8)
    made = functional.interpolate(
        flat if is_taken else flat.to(torch.float32),
        size=list(size),
        mode=interpolation.value,
        align_corners=False if smooth else None,
        antialias=bool(antialias) and smooth,
    )
    if not is_taken:
        made = made.to(image.dtype) if image.is_floating_point() else made.round().to(image.dtype)
    return made.reshape(*image.shape[:-2], *size)


def pad(image: Tensor, padding: Sequence[int] | int, fill: Any = 0, padding_mode: str = "constant") -> Tensor:
    """Pads by `padding`: of all sides, of left and top, or of left, top, right and bottom."""
    sides = [padding] if isinstance(padding, int) else list(padding)
    left, top, right, bottom = {1: sides * 4, 2: sides * 2, 4: sides}[len(sides)]
    values = list(fill) if isinstance(fill, Sequence) else [fill or 0]
    shape = [left, right, top, bottom]
    if padding_mode != "constant":
        flat = image.reshape(-1, *image.shape[-3:]).to(torch.float32)
        mode = {"edge": "replicate"}.get(padding_mode, padding_mode)
        made = functional.pad(flat, shape, mode=mode).to(image.dtype)
        return made.reshape(*image.shape[:-2], *made.shape[-2:])
    if len(values) == 1:
        return functional.pad(image, shape, value=values[0])
    channels = [functional.pad(image[..., index, :, :], shape, value=value) for index, value in enumerate(values)]
    return torch.stack(channels, dim=-3)


def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """Cuts a rectangle out; what of it lies outside is zero."""
    rows, columns = image.shape[-2:]
    inside = image[..., max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    sides = [max(-left, 0), max(-top, 0), max(left + width - columns, 0), max(top + height - rows, 0)]
    return pad(inside, sides) if any(sides) else inside


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    """Subtracts the mean of each channel, and divides by its deviation."""
    center, width = (torch.as_tensor(each, dtype=image.dtype, device=image.device) for each in (mean, std))
    center, width = (each.view(-1, 1, 1) if each.ndim == 1 else each for each in (center, width))
    image = image.sub_(center) if inplace else image.sub(center)
    return image.div_(width)


def grayscale_to_rgb(image: Tensor) -> Tensor:
    """Repeats the channel of grey images; others stay as they are."""
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:]) if image.shape[-3] == 1 else image


def rgb_to_grayscale(image: Tensor, num_output_channels: int = 1) -> Tensor:
    """Weighs the channels of coloured images."""
    if image.shape[-3] == 3:
        red, green, blue = (image.select(-3, index).to(torch.float32) for index in range(3))
        grey = (_GREY[0] * red + _GREY[1] * green + _GREY[2] * blue).unsqueeze(-3)
        image = grey.to(image.dtype)
    return image.expand(*image.shape[:-3], num_output_channels, *image.shape[-2:])


def to_dtype(image: Tensor, dtype: torch.dtype = torch.float32, scale: bool = False) -> Tensor:
    """Converts; with `scale`, bytes become numbers from 0 to 1, and back."""
    if not scale or image.is_floating_point() == dtype.is_floating_point:
        return image.to(dtype)
    if dtype.is_floating_point:
        return image.to(dtype).div_(torch.iinfo(image.dtype).max)
    return image.mul(torch.iinfo(dtype).max + 1.0 - 1e-3).to(dtype)


def pil_to_tensor(image: "Image.Image") -> Tensor:
    """Reads an image of Pillow, [channels, height, width] uint8."""
    values = torch.from_numpy(np.array(image))
    return values.unsqueeze(0) if values.ndim == 2 else values.permute(2, 0, 1)
