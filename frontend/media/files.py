"""Files of requests whose kind their content tells: an image, or a PDF, whose pages become images."""

import asyncio
import hashlib
from collections.abc import Callable

from quire.frontend.media.decoder import MediaDecoder
from quire.frontend.media.messages import DocumentFacts, OpenDocument
from quire.frontend.media.settings import MediaSettings
from quire.frontend.media.sources import MediaPart, Page, Sources

MAX_BYTES = 2**25
"""Of a document: a helper gets all of it for each page."""
_HEAD_BYTES = 1024
"""The mark of a PDF stands among so many bytes from its beginning."""
_INLINE_BYTES = 2**20


class Files:
    """Opens files.

    Args:
        sources: reads them.
        decoder: counts pages, in another process.
        settings: how the items of a part are read.
    """

    def __init__(self, sources: Sources, decoder: MediaDecoder, settings: Callable[[MediaPart], MediaSettings]) -> None:
        self._sources = sources
        self._decoder = decoder
        self._settings = settings

    async def open(self, part: MediaPart) -> list[MediaPart]:
        """The images of a file, in order; of a part of another kind, itself.

        Raises:
            ParameterError: it cannot be read; `param` is its name.
            UnavailableError: the host is too busy.
        """
        if not part.is_file:
            return [part]
        content = await self._sources.read(part)
        image = part._replace(source=content, is_file=False)
        if b"%PDF-" not in content.data[:_HEAD_BYTES]:
            return [image]
        if len(content.data) > MAX_BYTES:
            raise part.refusal(f"is a PDF of more than {MAX_BYTES} bytes; send fewer pages at once")
        form = self._settings(part).document
        question = OpenDocument(content.data, form.max_pages)
        facts = await self._decoder.ask(question, DocumentFacts, num_bytes=len(content.data), param=part.param)
        digest = await _digest(content.data)
        pages = [Page(number, form.dpi, digest) for number in range(facts.num_pages)]
        return [image._replace(source=content._replace(page=page)) for page in pages]


async def _digest(data: bytes) -> bytes:
    if len(data) > _INLINE_BYTES:
        return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
    return hashlib.sha256(data).digest()
