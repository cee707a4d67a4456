"""Reads images for a model whose encoder sees: of prompts of programs, and of conversations."""

import hashlib
from collections.abc import Sequence
from typing import Any

from quire.core.config.resolved import EncoderSpec
from quire.core.errors import ParameterError
from quire.core.wire.encoder_input import Features
from quire.core.wire.media import Modality
from quire.frontend.media.reader import MediaReader, ReadItem
from quire.frontend.media.sources import MediaPart, content_of
from quire.frontend.requests.async_tokenizer import AsyncTokenizer
from quire.frontend.requests.feature_prompts import FeaturePromptReader
from quire.frontend.requests.media_prompts import MediaPrompts
from quire.frontend.requests.prompt import Prompt

_PIXELS = "pixel_values"


class Seeing:
    """Reads images. Implements `FeatureSource`.

    Args:
        encoder: what the model's encoder reads.
    """

    modality: Modality = "image"

    def __init__(self, reader: MediaReader, encoder: EncoderSpec) -> None:
        self.reader = reader
        self._encoder = encoder

    async def features_of(self, value: Any, param: str) -> Features:
        """The features of one image: of Pillow, as an array, or the bytes of a file."""
        if isinstance(value, list | tuple):
            if len(value) != 1:
                raise ParameterError(f"{param} must be one image, and has {len(value)}.", param=param)
            [value] = value
        return await self.read([MediaPart("image", content_of("image", value, param), param)], param)

    async def read(self, parts: Sequence[MediaPart], param: str) -> Features:
        """The features of the only part.

        Raises:
            ParameterError: there are several, or it cannot be read.
        """
        if len(parts) != 1:
            raise ParameterError(f"This model sees one image, and the prompt has {len(parts)}.", param=param)
        [item] = await self.reader.read(parts)
        return self._features(item)

    def _features(self, item: ReadItem) -> Features:
        pixels, encoder = item.arrays[_PIXELS], self._encoder
        height, width = encoder.image_size
        if pixels.dtype != "<f4" or tuple(pixels.shape) != (1, encoder.num_channels, height, width):
            raise ParameterError(
                f"The checkpoint's image processor makes {pixels.dtype} {list(pixels.shape)}, but its encoder reads "
                f"floats [1, {encoder.num_channels}, {height}, {width}]; correct preprocessor_config.json.",
                param="model",
            )
        digest = hashlib.sha256(b"image:" + item.digest).digest()
        return Features(pixels.data, encoder.num_channels, encoder.max_rows, digest)


class SeenPrompts(MediaPrompts):
    """Reads conversations with an image: their text is the decoder's prompt.

    Args:
        prompts: begin the decoder's prompt.
    """

    def __init__(self, seeing: Seeing, tokenizer: AsyncTokenizer, prompts: FeaturePromptReader) -> None:
        super().__init__(seeing.reader, tokenizer)
        self._seeing = seeing
        self._prompts = prompts

    async def read(
        self,
        text: str,
        parts: Sequence[MediaPart],
        *,
        add_special_tokens: bool = True,
        must_fit: bool = True,
        param: str = "prompt",
    ) -> Prompt:
        """Reads a text and an image. The text gets no special tokens, whatever `add_special_tokens` is."""
        features = await self._seeing.read(parts, param)
        token_ids = await self._tokenizer.tokenize(text, add_special_tokens=False, must_fit=must_fit) if text else []
        return self._prompts.begun(Prompt(text, token_ids), features)

    async def read_ids(self, token_ids: list[int], parts: Sequence[MediaPart], *, param: str = "prompt") -> Prompt:
        """Reads token ids and an image."""
        return self._prompts.begun(Prompt(None, token_ids), await self._seeing.read(parts, param))
