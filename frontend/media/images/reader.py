"""Reads images into what a model's tower reads, by the model's processor."""

from typing import Any

import msgspec

from quire.frontend.media.errors import MediaError
from quire.frontend.media.images.alone import ImagesAlone, stands_alone
from quire.frontend.media.images.decoding import Image, read_image
from quire.frontend.media.images.rows import RowsReader
from quire.frontend.media.library_processor import (
    LibraryProcessor,
    check_usable,
    facts_of,
    load_processor,
    prepare,
    read_config,
)
from quire.frontend.media.messages import DescribeImages, ItemFacts, ReadImage, ReadRows, ReadyItem

_GREY = (127, 127, 127)


class ImageReader:
    """Reads images for the model in `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._library: LibraryProcessor | None = None
        self._alone: ImagesAlone | None = None
        self._rows: RowsReader | None = None
        self._facts = facts_of(self._load)

    @property
    def processor(self) -> Any:
        """The library's own."""
        assert self._library is not None, self._facts.fault
        return self._library.processor

    def read(self, question: DescribeImages | ReadImage | ReadRows) -> ItemFacts | ReadyItem:
        """An image as the tower reads it, or the facts of all. Raises MediaError."""
        if isinstance(question, DescribeImages):
            return self._facts
        check_usable(self._facts)
        if isinstance(question, ReadRows):
            if self._rows is None:
                raise MediaError("has rows of a tower, but this model takes images alone; send the image")
            return self._rows.read(question)
        image = read_image(question.data, question.pixels, question.max_pixels, question.background)
        return self.process(image, question.options)

    def process(self, image: Image.Image, options: dict[str, Any]) -> ReadyItem:
        """An image in RGB as the tower reads it. Raises MediaError."""
        check_usable(self._facts)
        if self._alone is not None:
            return self._alone.read(image, options)
        assert self._library is not None
        return self._library.read("image", image, options)

    def _load(self) -> ItemFacts:
        trial = Image.new("RGB", (64, 48), _GREY)
        prepare()
        config = read_config(self._folder)
        if stands_alone(config):
            self._alone = ImagesAlone(self._folder, config)
            self._alone.process(trial, {})
            return ItemFacts(is_whole=True)
        self._library = load_processor(self._folder)
        if getattr(self._library.processor, "image_processor", None) is None:
            raise ValueError("the checkpoint's files name no processor of images, or one that needs torchvision")
        mark = self._library.mark("image")
        additions = self._library.learn_additions(trial)
        tried = self._library.process("image", trial, {})
        self._rows = RowsReader(self._library, mark, tried)
        return msgspec.structs.replace(mark.facts, additions=additions)
