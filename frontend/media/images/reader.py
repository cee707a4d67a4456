"""The model's processor, as the Transformers library has it: makes an item's arrays and the text of its placeholders.

Only helper processes import this: the library takes seconds to load.
"""

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, model_type_to_module_name
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.processing_utils import ProcessorMixin

from quire.core.wire.media import Array
from quire.frontend.media.errors import MediaError
from quire.frontend.media.images.decoding import Image, read_image
from quire.frontend.media.messages import DescribeImages, ImageFacts, ReadImage, ReadyImage

_BEFORE, _AFTER = "quirebefore ", " quireafter"
_TEXT_ARRAYS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_FACT_BYTES = 4096
_GREY = (127, 127, 127)


class _Tokenizer:
    """Notes the text that a processor tokenizes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, *args, **kwargs)


class ImageReader:
    """Reads images for the model in `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._fault = ""
        self._placeholder = ""
        self._token_id = -1
        self.processor: Any = None
        try:
            self._load()
        except Exception as error:  # the library raises anything for files that it does not understand
            self._fault = " ".join(f"{type(error).__name__}: {error}".split())

    def read(self, question: DescribeImages | ReadImage) -> ImageFacts | ReadyImage:
        """An image as the tower reads it, or the facts of all. Raises MediaError."""
        if isinstance(question, DescribeImages):
            return ImageFacts(self._placeholder, self._token_id, self._fault)
        if self._fault:
            raise MediaError(f"cannot be read, because the model's processor is not usable ({self._fault})")
        image = read_image(question.data, question.pixels, question.max_pixels)
        try:
            return self._process(image, question.options)
        except MemoryError:
            raise
        except Exception as error:  # a processor may raise anything for a size that it does not expect
            raise MediaError(
                f"is not taken by the model's processor ({type(error).__name__}: {str(error)[:300]})"
            ) from None

    def _load(self) -> None:
        AutoVideoProcessor.from_pretrained = _no_video  # type: ignore[method-assign]
        ProcessorMixin.check_argument_for_proper_class = _check_others  # type: ignore[method-assign]
        self.processor = _read_processor(self._folder)
        if not isinstance(self.processor, ProcessorMixin) or not hasattr(self.processor, "image_processor"):
            raise ValueError("the checkpoint's files name no processor of images")
        self.processor.tokenizer = _Tokenizer(self.processor.tokenizer)
        config = AutoConfig.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        names = ("image_token_id", "image_token_index")
        token_id = next((getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), None)
        placeholder = getattr(self.processor, "image_token", None)
        if token_id is None or not isinstance(placeholder, str):
            raise ValueError("it has no token that stands for an image")
        self._placeholder, self._token_id = placeholder, token_id
        self._process(Image.new("RGB", (64, 48), _GREY), {})

    def _process(self, image: Image.Image, options: dict[str, Any]) -> ReadyImage:
        text = _BEFORE + self._placeholder + _AFTER
        made = self.processor(images=[image], text=[text], return_tensors="np", **options)
        seen = self.processor.tokenizer.text
        if not (seen.startswith(_BEFORE) and seen.endswith(_AFTER)):
            raise ValueError("it changes the text around an image")
        num_rows = int((np.asarray(made["input_ids"]) == self._token_id).sum())
        if not num_rows:
            raise ValueError("it makes no tokens of an image")
        values = {name: np.asarray(value) for name, value in made.items() if name not in _TEXT_ARRAYS}
        facts = {name for name, value in values.items() if _is_fact(value)}
        arrays = {name: _array(value) for name, value in values.items()}
        return ReadyImage(
            seen[len(_BEFORE) : len(seen) - len(_AFTER)],
            num_rows,
            {name: array for name, array in arrays.items() if name in facts},
            {name: array for name, array in arrays.items() if name not in facts},
            _digest(num_rows, arrays),
        )


def _read_processor(folder: str) -> Any:
    """Reads the processor of a checkpoint. The library hides classes that name torchvision, even for videos alone."""
    try:
        return AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError:
        settings = [Path(folder) / each for each in ("processor_config.json", "preprocessor_config.json")]
        values = [json.loads(path.read_bytes()) for path in settings if path.is_file()]
        wanted = next((each["processor_class"] for each in values if "processor_class" in each), None)
        kind = next((kind for kind, name in PROCESSOR_MAPPING_NAMES.items() if wanted and name == wanted), None)
        if wanted is None or kind is None:
            raise
    name = model_type_to_module_name(kind)
    module = importlib.import_module(f"transformers.models.{name}.processing_{name}")
    return getattr(module, wanted).from_pretrained(folder, local_files_only=True)


def _is_fact(value: np.ndarray) -> bool:
    return value.dtype.kind == "i" and value.ndim <= 2 and value.nbytes <= _FACT_BYTES


def _array(value: np.ndarray) -> Array:
    if value.dtype == np.float64:
        value = value.astype(np.float32)
    return Array(value.dtype.newbyteorder("<").str, value.shape, np.ascontiguousarray(value).tobytes())


def _digest(num_rows: int, arrays: dict[str, Array]) -> bytes:
    """Names an image by what the tower reads of it."""
    digest = hashlib.sha256(b"image:%d" % num_rows)
    for name, array in sorted(arrays.items()):
        digest.update(f":{name}:{array.dtype}:{array.shape}:".encode())
        digest.update(array.data)
    return digest.digest()


def _no_video(*_: Any, **__: Any) -> None:
    """Stands for the video processor, which needs torchvision."""


_check = ProcessorMixin.check_argument_for_proper_class


def _check_others(self: Any, name: str, argument: Any) -> Any:
    """Checks a processor's parts, but not the video processor, which is left out."""
    return None if argument is None else _check(self, name, argument)
