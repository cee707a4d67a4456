"""How the items of one request are read: by the server's settings, and the request's own over them."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from quire.core.config.media_io import check_io_options
from quire.core.config.multimodal import MultimodalConfig
from quire.core.errors import ConfigError, ParameterError
from quire.frontend.media.messages import Sampling

PROCESSOR_KWARGS, IO_KWARGS = "mm_processor_kwargs", "media_io_kwargs"
"""Names of a request's own settings."""


class Overrides(NamedTuple):
    """A request's own settings.

    Attributes:
        processor: keywords of the model's processor.
        io: how files are read, by kind.
    """

    processor: Mapping[str, Any] = {}
    io: Mapping[str, Mapping[str, Any]] = {}

    @classmethod
    def read(cls, processor: Any, io: Any = None) -> "Overrides":
        """Reads a request's fields; None is nothing.

        Raises:
            ParameterError: one is malformed, or has an option that there is not.
        """
        if processor is not None and not (
            isinstance(processor, Mapping) and all(isinstance(k, str) for k in processor)
        ):
            raise ParameterError(f"{PROCESSOR_KWARGS} must be an object of keywords.", param=PROCESSOR_KWARGS)
        try:
            check_io_options(io or {})
        except ConfigError as error:
            raise ParameterError(str(error), param=IO_KWARGS) from None
        return cls(processor or {}, io or {})

    @property
    def field(self) -> str | None:
        """The name of a field that asks for something; None if none does."""
        return PROCESSOR_KWARGS if self.processor else IO_KWARGS if self.io else None


class DocumentForm(Struct, frozen=True, array_like=True):
    """How pages of documents become images."""

    dpi: int = 144  # pixels an inch
    max_pages: int = 100  # a document with more is refused


class MediaSettings(Struct, frozen=True):
    """How items are read.

    Attributes:
        processor: keywords of the model's processor.
        background: RGB, of what transparent images lie on.
    """

    processor: dict[str, Any] = {}
    sampling: Sampling = Sampling()
    background: tuple[int, int, int] = (255, 255, 255)
    document: DocumentForm = DocumentForm()

    @classmethod
    def of(cls, config: MultimodalConfig, overrides: Overrides) -> "MediaSettings":
        """Those of a server for a request. A request that sets one of a video's `num_frames` and `fps` drops the
        server's other, as in vLLM; and it has no more pages read of a document than the server reads."""
        server = config.media_io_kwargs or {}
        asked = overrides.io.get("video", {})
        video = {} if asked else server.get("video", {})
        image = {**server.get("image", {}), **overrides.io.get("image", {})}
        form = DocumentForm(**server.get("document", {}))
        document = msgspec.structs.replace(form, **overrides.io.get("document", {}))
        background = tuple(image.get("rgba_background_color", cls().background))
        return cls(
            processor={**(config.mm_processor_kwargs or {}), **overrides.processor},
            sampling=Sampling(**{**video, **asked}),
            background=(background[0], background[1], background[2]),
            document=msgspec.structs.replace(document, max_pages=min(document.max_pages, form.max_pages)),
        )

    @property
    def digest(self) -> bytes:
        """Names settings by all that they say.

        Raises:
            ParameterError: a keyword of the processor has a value that is no plain one.
        """
        try:
            return hashlib.sha256(msgspec.msgpack.encode(self, order="deterministic")).digest()
        except (TypeError, ValueError) as error:
            raise ParameterError(f"{PROCESSOR_KWARGS} must be plain values: {error}.", param=PROCESSOR_KWARGS) from None
