"""Encoders of images whose size is fixed: how many rows they make, by what config.json says of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.core.errors import ConfigError

_BESIDE_PATCHES = {"vit": 1, "deit": 2, "beit": 1, "data2vec-vision": 1}
"""Model types with a row for each patch, and their rows beside these."""
_MERGING = ("swin", "swinv2", "donut-swin")
"""Model types whose stages, after the first, each merge four neighbouring rows into one."""


class ImageFacts(NamedTuple):
    """The images that an encoder reads, in pixels, and the rows that it makes of one."""

    height: int
    width: int
    num_rows: int


def read_image_facts(config: Mapping[str, Any]) -> ImageFacts | None:
    """The facts of an encoder; None if it reads no images.

    Raises:
        ConfigError: it is of a type that is not known here.
    """
    kind = config.get("model_type")
    if "image_size" not in config and "patch_size" not in config:
        return None
    if kind not in _BESIDE_PATCHES and kind not in _MERGING:
        raise ConfigError(
            f"config.json: the encoder of images is of type {kind!r}; those of the types "
            f"{', '.join((*_BESIDE_PATCHES, *_MERGING))} are served."
        )
    height, width = _both(config.get("image_size", 224))
    tall, wide = _both(config.get("patch_size", 4 if kind in _MERGING else 16))
    if kind in _BESIDE_PATCHES:
        return ImageFacts(height, width, (height // tall) * (width // wide) + _BESIDE_PATCHES[kind])
    rows, columns = -(-height // tall), -(-width // wide)
    for _ in range(len(config.get("depths", (2, 2, 6, 2))) - 1):
        rows, columns = -(-rows // 2), -(-columns // 2)
    return ImageFacts(height, width, rows * columns)


def _both(size: Any) -> tuple[int, int]:
    """A size of two dimensions, which one number may give."""
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)
