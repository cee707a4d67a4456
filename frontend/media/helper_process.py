"""The helper process: decodes one thing after another within limits of memory and time, and ends with its parent.

If a client's file makes a library hang, crash or grow, only this process is affected: the frontend kills it and starts
another.
"""

import pkgutil
import socket
from typing import Any, Protocol

from msgspec import Struct

from quire.frontend.helpers.frames import framed, receive
from quire.frontend.helpers.helper_side import held_bytes, is_large, limited, run_helper
from quire.frontend.media.errors import MediaError, UnknownKeywordError
from quire.frontend.media.messages import (
    DescribeAudio,
    DescribeImages,
    DescribeVideo,
    DivideSound,
    MediaQuestion,
    MediaRefused,
    MediaSetup,
    OpenDocument,
    ReadAudio,
    ReadImage,
    ReadPage,
    ReadRows,
    ReadSound,
    ReadVideo,
    ReadyItem,
)
from quire.frontend.media.settings import PROCESSOR_KWARGS
from quire.frontend.media.torchvision_parts import install

_SMALL_BYTES = 256 * 2**20
"""Of a process with few libraries: those that images, videos and sounds of prompts need take more."""

_IMAGES = "quire.frontend.media.images.reader:ImageReader"
_VIDEOS = "quire.frontend.media.videos.reader:VideoReader"
_AUDIO = "quire.frontend.media.sounds.items:AudioReader"
_PAGES = "quire.frontend.media.documents.reader:PageReader"
_OF_PROMPTS = (_IMAGES, _VIDEOS, _AUDIO, _PAGES)
"""Those that read items of prompts, by the library's processors."""
READERS: dict[type[Struct], str] = {
    ReadSound: "quire.frontend.media.sounds.reader:SoundReader",
    DescribeImages: _IMAGES,
    ReadImage: _IMAGES,
    ReadRows: _IMAGES,
    DescribeAudio: _AUDIO,
    ReadAudio: _AUDIO,
    DescribeVideo: _VIDEOS,
    ReadVideo: _VIDEOS,
    DivideSound: _AUDIO,
    OpenDocument: "quire.frontend.media.documents.reader:DocumentReader",
    ReadPage: _PAGES,
}
"""Import paths by question, because a reader is imported when it is first needed."""

MALFORMED = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""Errors that malformed data may cause in a library."""


class Reader(Protocol):
    """Answers questions of some types. Its construction loads libraries, and is not limited."""

    def __init__(self, folder: str) -> None: ...

    def read(self, question: Any) -> Any:
        """Reads what the question holds. Raises MediaError."""
        ...


class Readers:
    """The readers of one model's folder, each made with its first question."""

    def __init__(self, setup: MediaSetup) -> None:
        self._setup = setup
        self._readers: dict[str, Reader] = {}  # by import path
        self._own_bytes = 0  # with the libraries

    def prepare(self, question: Struct) -> None:
        """Loads the libraries that the question needs, outside of the limits that apply to its data."""
        path = READERS[type(question)]
        if path not in self._readers:
            if path in _OF_PROMPTS:
                install()
            self._readers[path] = pkgutil.resolve_name(path)(self._setup.folder)
            self._own_bytes = max(0, held_bytes() - _SMALL_BYTES)

    def answer(self, question: Struct) -> Struct:
        """The reader's answer, or a refusal if the data or the limit of memory says no."""
        try:
            with limited(self._setup.limit_bytes, self._setup.limit_cpu_seconds):
                answer = self._readers[READERS[type(question)]].read(question)
                if isinstance(answer, ReadyItem):
                    answer = self._narrowed(answer)
        except UnknownKeywordError as error:
            answer = MediaRefused(str(error), PROCESSOR_KWARGS)
        except MediaError as error:
            answer = MediaRefused(str(error))
        except MemoryError:
            answer = MediaRefused("takes too much memory to decode")
        except MALFORMED as error:
            answer = MediaRefused(f"cannot be decoded ({type(error).__name__}: {str(error)[:200]})")
        answer.is_large = is_large(self._own_bytes)
        return answer

    def _narrowed(self, item: ReadyItem) -> ReadyItem:
        # Imported here, because it needs torch, which the readers of such items have loaded, and others never do.
        from quire.frontend.media.narrowing import narrowed

        return narrowed(item, self._setup.dtype)


def serve(connection: socket.socket) -> None:
    """Answers questions until the parent closes the socket.

    Raises:
        EOFError: the parent closed the socket.
    """
    readers = Readers(receive(connection, MediaSetup))
    while True:
        question = receive(connection, MediaQuestion)
        refusal: MediaRefused | None = None
        try:
            readers.prepare(question)
        except MediaError as error:
            refusal = MediaRefused(str(error))
        connection.sendall(framed(refusal or readers.answer(question)))


if __name__ == "__main__":
    run_helper(serve)
