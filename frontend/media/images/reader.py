"""Reads images into what a model's tower reads, by the model's processor."""

from typing import Any

from quire.frontend.media.errors import MediaError
from quire.frontend.media.images.alone import ImagesAlone, stands_alone
from quire.frontend.media.images.decoding import Image, read_image
from quire.frontend.media.images.rows import RowsReader
from quire.frontend.media.library_processor import LibraryProcessor, load_processor, prepare, read_config
from quire.frontend.media.messages import DescribeImages, ItemFacts, ReadImage, ReadRows, ReadyItem

_GREY = (127, 127, 127)


class ImageReader:
    """Reads images for the model in `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._facts = ItemFacts()
        self._library: LibraryProcessor | None = None
        self._alone: ImagesAlone | None = None
        self._rows: RowsReader | None = None
        try:
            self._load()
        except Exception as error:  # the library raises anything for files that it does not understand
            self._facts = ItemFacts(fault=" ".join(f"{type(error).__name__}: {error}".split()))

    @property
    def processor(self) -> Any:
        """The library's own."""
        assert self._library is not None, self._facts.fault
        return self._library.processor

    def read(self, question: DescribeImages | ReadImage | ReadRows) -> ItemFacts | ReadyItem:
        """An image as the tower reads it, or the facts of all. Raises MediaError."""
        if isinstance(question, DescribeImages):
            return self._facts
        if self._facts.fault:
            raise MediaError(f"cannot be read, because the model's processor is not usable ({self._facts.fault})")
        if isinstance(question, ReadRows):
            if self._rows is None:
                raise MediaError("has rows of a tower, but this model takes images alone; send the image")
            return self._rows.read(question)
        image = read_image(question.data, question.pixels, question.max_pixels)
        try:
            if self._alone is not None:
                return self._alone.process(image, question.options)
            assert self._library is not None
            return self._library.process("image", image, question.options)
        except MemoryError:
            raise
        except Exception as error:  # a processor may raise anything for a size that it does not expect
            raise MediaError(
                f"is not taken by the model's processor ({type(error).__name__}: {str(error)[:300]})"
            ) from None

    def _load(self) -> None:
        trial = Image.new("RGB", (64, 48), _GREY)
        prepare()
        config = read_config(self._folder)
        if stands_alone(config):
            self._alone = ImagesAlone(self._folder, config)
            self._alone.process(trial, {})
            self._facts = ItemFacts(is_whole=True)
            return
        self._library = load_processor(self._folder)
        if getattr(self._library.processor, "image_processor", None) is None:
            raise ValueError("the checkpoint's files name no processor of images, or one that needs torchvision")
        mark = self._library.mark("image")
        tried = self._library.process("image", trial, {})
        self._rows = RowsReader(self._library, mark, tried)
        self._facts = ItemFacts(mark.text, mark.token_id)
