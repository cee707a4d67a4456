"""Where images, videos and sounds of a request come from: addresses, data in it, files, and a program's own objects."""

import asyncio
import binascii
import functools
import io
import sys
import urllib.parse
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.core import envs
from quire.core.config.multimodal import MultimodalConfig
from quire.core.errors import ParameterError
from quire.core.wire.media import Modality
from quire.frontend.fetching.fetcher import Fetcher, FetchError, FetchRules
from quire.frontend.media.frames import frames_of
from quire.frontend.media.messages import Frames, Pixels
from quire.frontend.media.samples import read_samples_of
from quire.frontend.media.settings import Overrides

MAX_BYTES = 2**27
"""Of one item, encoded."""
MAX_REDIRECTS = 3


class Page(NamedTuple):
    """A page of a document, to be read as an image.

    Attributes:
        number: from 0.
        dpi: pixels an inch.
        digest: of the document.
    """

    number: int
    dpi: int
    digest: bytes


class Content(NamedTuple):
    """The content of an item: a file's bytes, rows of pixels, samples as float32, frames of a video, or what a tower
    has made of an image.

    Attributes:
        rate: samples a second; 0: as many as the model takes; None: `data` has no samples.
        grid: of an image whose rows are `data`, both as torch.save writes them; empty: it has none. None: `data` has no
            rows.
        page: of the document that `data` is; None: it is none.
    """

    data: bytes
    pixels: Pixels | None = None
    rate: int | None = None
    frames: Frames | None = None
    grid: bytes | None = None
    page: Page | None = None

    def update(self, digest: Any) -> None:
        """Adds all that the content is to a digest of hashlib."""
        form = (self.pixels, self.rate, self.frames, self.grid, self.page)
        digest.update(b"content:" + msgspec.msgpack.encode(form))
        if self.page is None:
            digest.update(self.data)


class MediaPart(NamedTuple):
    """An item of a request.

    Attributes:
        source: an address, or the content itself; None for what the server has under `uuid` already.
        param: the client's name of the item, such as `messages[0].content[1].image_url`.
        uuid: the client's name of the content, in place of a digest.
        overrides: the request's own settings.
        is_file: the content tells whether it is an image, or a document, whose pages are several.
    """

    modality: Modality
    source: str | Content | None
    param: str
    uuid: str | None = None
    overrides: Overrides = Overrides()
    is_file: bool = False

    def refusal(self, message: str) -> ParameterError:
        """The error for this item; `message` goes on from its name."""
        return _refusal(self.param, message)


class Sources:
    """Reads items within the server's rules."""

    def __init__(self, config: MultimodalConfig) -> None:
        self._fetchers: dict[Modality, Fetcher] = {
            "image": Fetcher(_rules(config, envs.read_float("IMAGE_FETCH_TIMEOUT"))),
            "audio": Fetcher(_rules(config, envs.read_float("AUDIO_FETCH_TIMEOUT"))),
            "video": Fetcher(_rules(config, envs.read_float("VIDEO_FETCH_TIMEOUT"))),
        }
        folder = config.allowed_local_media_path
        self._folder = Path(folder).expanduser().resolve() if folder else None

    async def read(self, part: MediaPart) -> Content:
        """The content of an item.

        Raises:
            ParameterError: it cannot be read, or must not be.
        """
        source = part.source
        if isinstance(source, Content):
            return source
        assert source is not None
        scheme = source.partition(":")[0].lower()
        if scheme == "data":
            return _of_data_url(part, source)
        if scheme == "file":
            return Content(await asyncio.to_thread(self._read_file, part, source))
        if scheme not in ("http", "https"):
            raise part.refusal("must be an address that begins with http:, https:, data: or file:")
        try:
            async with self._fetchers[part.modality].get(source) as chunks:
                return Content(b"".join([chunk async for chunk in chunks]))
        except FetchError as error:
            raise part.refusal(f"was not fetched: {error}") from None

    def _read_file(self, part: MediaPart, source: str) -> bytes:
        if self._folder is None:
            raise part.refusal("names a file, and this server was started without --allowed-local-media-path")
        try:
            address = urllib.parse.urlsplit(source)
            if address.netloc not in ("", "localhost"):
                raise part.refusal("names a file of another host")
            path = Path(urllib.parse.unquote(address.path)).resolve()
            if not path.is_relative_to(self._folder) or not path.is_file():
                raise part.refusal("names no file below --allowed-local-media-path")
            if path.stat().st_size > MAX_BYTES:
                raise part.refusal(f"has more than {MAX_BYTES} bytes")
            return path.read_bytes()
        except (OSError, ValueError) as error:
            if isinstance(error, ParameterError):
                raise
            raise part.refusal(f"names a file that cannot be read ({error})") from None


def _rules(config: MultimodalConfig, total_seconds: float) -> FetchRules:
    domains = config.allowed_media_domains
    return FetchRules(
        domains=None if domains is None else frozenset(map(str.lower, domains)),
        allows_private=domains is not None,  # the server's owner named the hosts
        max_redirects=MAX_REDIRECTS,
        max_bytes=MAX_BYTES,
        total_seconds=total_seconds,
    )


def content_of(modality: Modality, value: Any, param: str) -> Content:
    """The content of a program's object: bytes of a file, an image of Pillow, an array of pixels, or samples.

    Raises:
        ParameterError: it is none of these.
    """
    if isinstance(value, bytes | bytearray):
        return Content(bytes(value))
    if modality == "audio":
        samples = read_samples_of(value, param)
        return Content(samples.data, rate=samples.rate)
    if modality == "video":
        return Content(*frames_of(value, param))
    if is_rows(value):
        return rows_of(value, param)
    if hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "convert"):  # an image of Pillow
        if value.mode not in ("RGB", "RGBA", "L"):
            has_alpha = value.mode in ("LA", "PA") or "transparency" in value.info
            value = value.convert("RGBA" if has_alpha else "RGB")
        return Content(value.tobytes(), Pixels(value.mode, *value.size))
    shape: tuple[int, ...] = getattr(value, "shape", ())
    kind = str(getattr(value, "dtype", ""))
    if kind == "uint8" and len(shape) == 3 and shape[2] in (3, 4) and hasattr(value, "tobytes"):
        return Content(value.tobytes(), Pixels("RGB" if shape[2] == 3 else "RGBA", shape[1], shape[0]))
    raise ParameterError(
        f"{param} must be an image of Pillow, the bytes of a file, or an array [height, width, 3] of uint8, got "
        f"{type(value).__name__}.",
        param=param,
    )


def is_rows(value: Any) -> bool:
    """Returns True for what a tower has made of one image: a tensor [num_rows, hidden], or one beside its grid."""
    is_tensor = hasattr(value, "detach") and hasattr(value, "is_floating_point")
    return isinstance(value, Mapping) or (is_tensor and value.is_floating_point() and value.ndim == 2)


def rows_of(value: Any, param: str) -> Content:
    """The content of such a value. Its tensors may be files of torch.save in base64 instead.

    Raises:
        ParameterError: it is none of these.
    """
    fields = value if isinstance(value, Mapping) else {"image_embeds": value}
    if not {"image_embeds"} <= set(fields) <= {"image_embeds", "image_grid_thw"}:
        raise ParameterError(
            f"{param} must be a tensor, or an object with image_embeds and, for a model that asks for it, "
            "image_grid_thw.",
            param=param,
        )
    rows, grid = (_saved(fields.get(name), param) for name in ("image_embeds", "image_grid_thw"))
    if not rows:
        raise ParameterError(f"{param} has no image_embeds.", param=param)
    return Content(rows, grid=grid)


def _saved(value: Any, param: str) -> bytes:
    """A tensor as torch.save writes it; empty for None."""
    if value is None:
        return b""
    if isinstance(value, str):
        return _of_base64(value, functools.partial(_refusal, param))
    if not hasattr(value, "detach"):
        raise ParameterError(
            f"{param} must have tensors, or files of torch.save in base64, got {type(value).__name__}.", param=param
        )
    buffer = io.BytesIO()
    sys.modules["torch"].save(  # whoever has a tensor has loaded it
        value.detach().cpu().clone(), buffer
    )
    return buffer.getvalue()


def _refusal(param: str, message: str) -> ParameterError:
    return ParameterError(f"{param} {message}.", param=param)


def _of_data_url(part: MediaPart, source: str) -> Content:
    head, _, body = source.partition(",")
    if part.modality == "video" and head.lower().startswith("data:video/jpeg;"):
        if len(body) > MAX_BYTES // 3 * 4:
            raise part.refusal(f"has more than {MAX_BYTES} bytes")
        return Content(body.encode("ascii", "replace"), frames=Frames())
    return Content(_decoded(part, source))


def _decoded(part: MediaPart, source: str) -> bytes:
    head, comma, body = source.partition(",")
    if not comma or not head.rstrip().endswith(";base64"):
        raise part.refusal("must have the form data:image/png;base64,... or the like where it holds the item")
    return _of_base64(body, part.refusal)


def _of_base64(body: str, refusal: Callable[[str], ParameterError]) -> bytes:
    if len(body) > MAX_BYTES // 3 * 4:
        raise refusal(f"has more than {MAX_BYTES} bytes")
    try:
        return b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refusal(f"is no valid base64 ({error})") from None
