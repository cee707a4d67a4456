"""Images that are no part of a text, by the image processor of the Transformers library alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES

from quire.frontend.media.errors import UnknownKeywordError
from quire.frontend.media.library_processor import keywords_of, ready_item, taken
from quire.frontend.media.messages import ReadyItem


def stands_alone(config: PretrainedConfig) -> bool:
    """True if the model's images are no part of a text: it makes vectors of either, or an encoder reads images."""
    return config.model_type in MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES or _has_image_encoder(config)


def _has_image_encoder(config: PretrainedConfig) -> bool:
    return config.is_encoder_decoder and hasattr(getattr(config, "encoder", None), "image_size")


class ImagesAlone:
    """The image processor of one checkpoint.

    Raises:
        ValueError: the files name none, or one that needs torchvision.
    """

    def __init__(self, folder: str, config: PretrainedConfig) -> None:
        made: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if made is None:
            raise ValueError("the checkpoint's files name no processor of images, or one that needs torchvision")
        self._processor = made
        vision: Any = config.encoder if _has_image_encoder(config) else getattr(config, "vision_config", config)
        if hasattr(vision, "num_patches"):
            self._shape: tuple[int, ...] = (vision.num_channels * vision.patch_size**2,)  # of a patch
        else:
            size = vision.image_size
            self._shape = tuple(size) if isinstance(size, list | tuple) else (size, size)

    def read(self, image: Image.Image, options: Mapping[str, Any]) -> ReadyItem:
        """Makes the arrays of one image of a client. Raises MediaError."""
        known = keywords_of(self._processor)
        if unknown := sorted(set(options) - known):
            raise UnknownKeywordError(unknown[0], known)
        return taken(lambda: self.process(image, options))

    def process(self, image: Image.Image, options: Mapping[str, Any]) -> ReadyItem:
        """Makes the arrays of one image. Raises ValueError if the model does not read their size."""
        made = self._processor(images=[image], return_tensors="np", **options)
        values = {name: np.asarray(value) for name, value in made.items()}
        found = values["pixel_values"].shape[-len(self._shape) :]
        if found != self._shape:
            sizes = (" x ".join(map(str, each)) for each in (found, self._shape))
            raise ValueError("it makes {} numbers of an image or a patch, and the model reads {}".format(*sizes))
        return ready_item("image", "", 1, values)
