"""The stand-ins for torchvision's functions give what torchvision gives."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire.frontend.media import image_functions
from tests.image_checkpoints import make_image

try:
    from torchvision.transforms.v2 import functional as real
except (ImportError, RuntimeError) as error:  # one for another build of torch raises RuntimeError
    pytest.skip(f"torchvision does not load here: {error}", allow_module_level=True)

BYTES = torch.from_numpy(np.array(make_image(37, 29))).permute(2, 0, 1)
IMAGES = {
    "bytes": BYTES,
    "floats": BYTES / 255,
    "frames": torch.stack([BYTES, BYTES.flip(-1)]),
    "videos": torch.stack([BYTES, BYTES.flip(-1)])[None].float(),
    "half": (BYTES / 255).to(torch.bfloat16),
}
GREY = BYTES[:1]


def resizes() -> Iterator[tuple[Any, ...]]:
    for mode in ("BILINEAR", "BICUBIC", "NEAREST", "NEAREST_EXACT"):
        for size in ([17, 50], [58, 13], [29, 37]):
            for antialias in (True, False):
                yield "resize", (size,), {"interpolation": mode, "antialias": antialias}


CALLS: list[tuple[Any, ...]] = [
    *resizes(),
    *(("pad", (padding,), {"fill": fill}) for padding in (3, [4], [1, 2], [1, 2, 3, 4]) for fill in (0, 7)),
    ("pad", ([1, 2, 3, 4],), {"fill": [1.0, 2.0, 3.0]}),
    *(("pad", ([1, 2, 3, 4],), {"padding_mode": mode}) for mode in ("edge", "reflect")),
    *(("crop", box, {}) for box in ((3, 4, 10, 12), (-3, -4, 20, 20), (20, 30, 15, 15), (-2, -2, 40, 50))),
    ("rgb_to_grayscale", (), {}),
    ("rgb_to_grayscale", (3,), {}),
    *(("to_dtype", (kind,), {"scale": scale}) for kind in (torch.float32, torch.uint8) for scale in (True, False)),
]


@pytest.mark.turns(1)
@pytest.mark.parametrize("form", IMAGES)
def test_the_functions_are_those_of_torchvision(form: str) -> None:
    for name, given, options in CALLS:
        image = IMAGES[form]
        if name == "to_dtype" and options["scale"] and given[0] == torch.uint8 and image.is_floating_point():
            image = image.clamp(0, 1)
        found = call(name, image_functions, image, given, options)
        expected = call(name, real, image, given, options)
        tolerance = {torch.uint8: 0, torch.bfloat16: 1e-2}.get(expected.dtype, 1e-5)
        what = f"{name} {given} {options}"
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, msg=what)


def call(name: str, module: Any, image: torch.Tensor, given: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    options = dict(options)
    if "interpolation" in options:
        from torchvision.transforms import InterpolationMode

        kind: Any = InterpolationMode if module is real else image_functions.InterpolationMode
        options["interpolation"] = kind[options["interpolation"]]
    function: Callable[..., torch.Tensor] = getattr(module, name)
    return function(image.clone(), *given, **options)


def test_values_are_normalized_and_grey_is_repeated() -> None:
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    for image in (IMAGES["floats"], IMAGES["videos"]):
        found, expected = (each.normalize(image.clone(), mean, std) for each in (image_functions, real))
        torch.testing.assert_close(found, expected)
    for image in (GREY, BYTES, GREY[None]):
        torch.testing.assert_close(image_functions.grayscale_to_rgb(image), real.grayscale_to_rgb(image))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_images_of_pillow_are_read(mode: str) -> None:
    image: Image.Image = make_image(9, 7).convert(mode)
    torch.testing.assert_close(image_functions.pil_to_tensor(image), real.pil_to_tensor(image))
