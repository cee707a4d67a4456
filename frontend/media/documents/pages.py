"""Renders pages of PDF files, by PDFium: as a viewer shows them, with filled forms and notes, on white.

Only helper processes do: the library is written in C++, and the files come from anywhere.
"""

import contextlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

from quire.frontend.media.errors import MediaError, MissingLibraryError
from quire.frontend.media.images.decoding import check_size

try:
    import pypdfium2
except ImportError:
    raise MissingLibraryError("pypdfium2") from None

_POINTS_AN_INCH = 72
_LOCKED = (4, 5)
"""PDFium's codes of a document that needs a password, or has a form of security that it does not know."""


def count_pages(data: bytes, max_pages: int) -> int:
    """The pages of a document.

    Raises:
        MediaError: it is none, damaged, locked, or has no page, or more than `max_pages`.
    """
    with _opened(data) as document:
        count = len(document)
    if not count:
        raise MediaError("is a PDF without pages")
    if count > max_pages:
        raise MediaError(
            f"is a PDF of {count} pages, and {max_pages} are read (max_pages of document in --media-io-kwargs); send "
            "fewer"
        )
    return count


def render_page(data: bytes, index: int, dpi: int, max_pixels: int) -> Image.Image:
    """A page in RGB.

    Args:
        index: the page's, from 0.
        dpi: pixels an inch.
        max_pixels: a page with more is refused; 0: no limit.

    Raises:
        MediaError: it is damaged or too large.
    """
    with _opened(data) as document:
        try:
            document.init_forms()
            page = document[index]
            width, height = page.get_size()  # in points, turned as the page says
            scale = dpi / _POINTS_AN_INCH
            if not (width > 0 and height > 0 and math.isfinite(width * height)):
                raise MediaError(f"has a page, number {index + 1}, without a size")
            try:
                check_size((math.ceil(width * scale), math.ceil(height * scale)), max_pixels)
            except MediaError as error:
                raise MediaError(f"has a page, number {index + 1}, that {error}") from None
            image: Image.Image = page.render(scale=scale).to_pil()
            return image.convert("RGB")
        except (pypdfium2.PdfiumError, IndexError) as error:
            raise MediaError(f"has a page, number {index + 1}, that cannot be shown ({error})") from None


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    with contextlib.suppress(pypdfium2.PdfiumError):
        pypdfium2.PdfDocument(b"no PDF")  # a document that fails in silence would have the code of the one before it
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code in _LOCKED:
            raise MediaError("is an encrypted PDF; send it without its password") from None
        raise MediaError(f"is a PDF that cannot be read, or is damaged or cut off ({error})") from None
    try:
        yield document
    finally:
        document.close()
