"""Reads documents: how many pages they have, and each page as an image that a model's tower reads."""

from quire.frontend.media.documents.pages import count_pages, render_page
from quire.frontend.media.images.reader import ImageReader
from quire.frontend.media.messages import DocumentFacts, OpenDocument, ReadPage, ReadyItem


class DocumentReader:
    """Opens documents, for any model."""

    def __init__(self, folder: str) -> None: ...

    def read(self, question: OpenDocument) -> DocumentFacts:
        """What a document has. Raises MediaError."""
        return DocumentFacts(count_pages(question.data, question.max_pages))


class PageReader:
    """Reads pages for the model in `folder`."""

    def __init__(self, folder: str) -> None:
        self._images = ImageReader(folder)

    def read(self, question: ReadPage) -> ReadyItem:
        """A page as the tower reads it. Raises MediaError."""
        page = render_page(question.data, question.index, question.dpi, question.max_pixels)
        return self._images.process(page, question.options)
