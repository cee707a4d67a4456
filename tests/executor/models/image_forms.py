"""Forms of images: the arrays that the tower of a class of Transformers reads, told by the names of its arguments."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

_GRIDS = ((4, 8), (8, 4), (4, 4))
"""Height and width of the images, in patches."""
_TURNED = ((6, 12), (12, 6), (6, 12))
"""The same where all images have as many patches."""

_MOST_ROWS = 64

Arrays = dict[str, Tensor]


def base_of(reference: PreTrainedModel) -> Any:
    """The part of the library's model that has the tower."""
    base = getattr(reference, "model", reference)
    return base if hasattr(base, "get_image_features") else reference


def images_for(reference: PreTrainedModel) -> list[Arrays]:
    """Makes the arrays of each image, in the first form that the class takes."""
    for forms in _forms(reference):
        try:
            for arrays in forms:
                num_rows(reference, arrays)
        except Exception:  # whatever the library raises for arrays of another form
            continue
        return forms
    raise ValueError("its arguments tell no form of images")


def num_rows(reference: PreTrainedModel, arrays: Arrays) -> int:
    """Counts the rows that the tower makes of an image."""
    base = base_of(reference)
    if not hasattr(base, "get_image_features"):
        return _num_taken(reference, arrays)
    with torch.inference_mode():
        features = base.get_image_features(**arrays, return_dict=True)
    rows = getattr(features, "pooler_output", features)
    return _count_rows(features.last_hidden_state if rows is None else rows)


def _num_taken(reference: PreTrainedModel, arrays: Arrays) -> int:
    """The number of placeholders that a class takes beside an image, where it shows no rows."""
    for number in range(2, _MOST_ROWS):
        token_ids = torch.full((1, number), image_token(reference))
        with contextlib.suppress(Exception), torch.inference_mode():
            reference(input_ids=token_ids, **arrays)
            return number
    raise ValueError("it takes no number of placeholders")


def image_token(reference: PreTrainedModel) -> int:
    """The token that stands for a row."""
    configs = (reference.config, getattr(reference.config, "vision_config", None))
    return int(next(found for each in configs if (found := getattr(each, "image_token_id", None)) is not None))


def _count_rows(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.numel() // features.shape[-1]
    return sum(_count_rows(each) for each in features)


class _Tower(NamedTuple):
    """What a class says of its tower: the names of its arguments, and sizes in pixels."""

    names: set[str]
    config: Any
    patch: int
    channels: int
    generator: torch.Generator

    @classmethod
    def of(cls, reference: PreTrainedModel) -> "_Tower":
        vision = getattr(reference.config, "vision_config", reference.config)
        patch = _first(vision, "patch_size", default=14)
        channels = _first(vision, "in_channels", "num_channels", default=3)
        names = {*inspect.signature(_reader(reference)).parameters}
        return cls(names, reference.config, patch, channels, torch.Generator().manual_seed(2))

    @property
    def vision(self) -> Any:
        return getattr(self.config, "vision_config", self.config)

    @property
    def flat(self) -> int:
        """Values of a patch."""
        return self.channels * self.patch**2

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def _reader(reference: PreTrainedModel) -> Any:
    base = base_of(reference)
    return getattr(base, "get_image_features", base.forward)


def _forms(reference: PreTrainedModel) -> Iterator[list[Arrays]]:
    """The forms of images that the arguments of a class may mean."""
    tower = _Tower.of(reference)
    make = next((make for name, make in _BY_ARGUMENT.items() if name in tower.names), _squares)
    yield from make(tower)


def _grids_in_time(tower: _Tower) -> Iterator[list[Arrays]]:
    times = _first(tower.vision, "temporal_patch_size", "patch_temporal", default=1)
    sides = (tower.patch, tower.patch)
    for shape in ((tower.flat * times,), (tower.channels, *sides), (tower.flat,)):
        merged = {"image_merge_sizes": torch.tensor([2])} if "image_merge_sizes" in tower.names else {}
        yield [
            {"pixel_values": tower.noise(h * w, *shape), "image_grid_thw": torch.tensor([[1, h, w]]), **merged}
            for h, w in _GRIDS
        ]
    yield from _merged_patches(tower)


def _merged_patches(tower: _Tower) -> Iterator[list[Arrays]]:
    """Patches of as many pixels as a row stands for, their channels last."""
    side = tower.patch * _first(tower.vision, "spatial_merge_size", default=1)
    yield [
        {"pixel_values": tower.noise(h * w, side, side, tower.channels), "image_grid_thw": torch.tensor([[1, h, w]])}
        for h, w in ((2, 4), (4, 2), (2, 2))
    ]


def _grids(tower: _Tower) -> Iterator[list[Arrays]]:
    yield [{"pixel_values": tower.noise(h * w, tower.flat), "image_grid_hw": torch.tensor([[h, w]])} for h, w in _GRIDS]


def _shapes(tower: _Tower) -> Iterator[list[Arrays]]:
    yield [
        {
            "pixel_values": tower.noise(1, h * w, tower.flat),
            "spatial_shapes": torch.tensor([[h, w]]),
            "pixel_attention_mask": torch.ones(1, h * w, dtype=torch.int64),
        }
        for h, w in _TURNED
    ]


def _places(tower: _Tower) -> Iterator[list[Arrays]]:
    side = _first(tower.vision, "model_patch_size", default=tower.patch)
    for each in (tower.flat, tower.channels * side**2):
        yield [
            {
                "pixel_values": tower.noise(1, h * w, each),
                "image_position_ids": torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)[None],
            }
            for h, w in _TURNED
        ]


def _strips(tower: _Tower) -> Iterator[list[Arrays]]:
    yield [
        {
            "pixel_values": tower.noise(1, tower.channels, tower.patch, h * w * tower.patch),
            "target_sizes": torch.tensor([[h, w]], dtype=torch.int32),
        }
        for h, w in _GRIDS
    ]


def _two_sharpnesses(tower: _Tower) -> Iterator[list[Arrays]]:
    sharp = tower.config.high_res_vision_config.image_size
    yield [{**arrays, "high_res_pixel_values": tower.noise(1, 3, sharp, sharp)} for arrays in next(_squares(tower))]


def _with_instructions(tower: _Tower) -> Iterator[list[Arrays]]:
    """Q-Formers that read the text, too; a video is frames of an image."""
    for frames in ((), (2,)):
        size = tower.vision.image_size
        yield [
            {
                "pixel_values": tower.noise(1, *frames, tower.channels, size, size),
                "qformer_input_ids": torch.tensor([[5, 6, 7 + index]]),
            }
            for index in range(len(_GRIDS))
        ]


def _pooled(tower: _Tower) -> Iterator[list[Arrays]]:
    """Patches of one crop, and the patches of which each row is made."""
    side = _first(tower.vision, "image_size", default=4 * tower.patch) // tower.patch
    quarter = torch.arange(side**2).view(side // 2, 2, side // 2, 2).transpose(1, 2).reshape(-1, 4)
    yield [
        {
            "pixel_values": tower.noise(1, side**2, tower.flat),
            "image_token_pooling": quarter,
            "image_grids": torch.tensor([[side // 2, side // 2, 0, 0]]),
        }
        for _ in _GRIDS
    ]


def _crops(tower: _Tower) -> Iterator[list[Arrays]]:
    """A small view and crops, of which a mask says what is padding."""
    size = tower.vision.crop_size
    side = size // tower.patch
    yield [
        {
            "image_pixel_values": tower.noise(1, 1 + count, tower.channels, size, size),
            "image_sizes": torch.tensor([[size, size * count]]),
            "image_attention_mask": torch.ones(1, 1 + count, side, side),
        }
        for count in (2, 2, 2)
    ]


def _squares(tower: _Tower) -> Iterator[list[Arrays]]:
    size = _first(getattr(tower.vision, "sam_config", tower.vision), "image_size", default=4 * tower.patch)
    extras: list[Arrays] = [{}]
    if "image_sizes" in tower.names:
        extras += [{"image_sizes": torch.tensor([[size, width]])} for width in (size, 2 * size)]
    tiles = (1,), (1, 3), (1, 5), (3,)
    for first, extra in itertools.product(tiles, extras):
        arrays = [{"pixel_values": tower.noise(*first, tower.channels, size, size), **extra} for _ in _GRIDS]
        if "pixel_attention_mask" in tower.names:
            for shape in ((*first, size, size), first):
                yield [{**each, "pixel_attention_mask": torch.ones(shape, dtype=torch.bool)} for each in arrays]
        else:
            yield arrays
    yield [{"pixel_values": tower.noise(1, 16, tower.flat)} for _ in _GRIDS]
    times = _first(tower.vision, "temporal_patch_size", default=1)
    yield [{"pixel_values": tower.noise(h * w, times, tower.patch, tower.patch, tower.channels)} for h, w in _GRIDS]


_BY_ARGUMENT: dict[str, Callable[[_Tower], Iterator[list[Arrays]]]] = {
    "image_grid_thw": _grids_in_time,
    "image_grid_hw": _grids,
    "spatial_shapes": _shapes,
    "image_position_ids": _places,
    "target_sizes": _strips,
    "high_res_pixel_values": _two_sharpnesses,
    "qformer_input_ids": _with_instructions,
    "image_token_pooling": _pooled,
    "image_attention_mask": _crops,
}
"""The forms by the argument that tells them."""


def _first(config: Any, *names: str, default: int) -> int:
    value = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)
    return value[0] if isinstance(value, list | tuple) else value
