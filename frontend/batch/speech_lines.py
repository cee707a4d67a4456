"""Lines of a batch that transcribe or translate a sound: the body names it by a URL."""

import binascii
from base64 import b64decode
from typing import ClassVar, Literal
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from quire.core import envs
from quire.core.errors import ParameterError
from quire.frontend.audio.schema import SpeechRequest
from quire.frontend.audio.service import SpeechToText
from quire.frontend.fetching.fetcher import Fetcher, FetchError, FetchRules

_JSON_FORMATS = ("json", "verbose_json", "diarized_json")


class TranscriptionLine(SpeechRequest, forbid_unknown_fields=True, kw_only=True):
    """A transcription of the sound at `file_url`: http, https, or a data URL in base64."""

    file_url: str


class TranslationLine(TranscriptionLine, forbid_unknown_fields=True, kw_only=True):
    """A translation of the sound at `file_url`."""

    task: ClassVar[Literal["transcribe", "translate"]] = "translate"


class SpeechLines:
    """Answers such lines."""

    def __init__(self, service: SpeechToText) -> None:
        self._service = service
        self._max_bytes = int(envs.read_float("MAX_AUDIO_CLIP_FILESIZE_MB") * 2**20)
        seconds = envs.read_float("AUDIO_FETCH_TIMEOUT")
        self._fetcher = Fetcher(
            FetchRules(max_bytes=self._max_bytes, total_seconds=seconds, max_redirects=5, allows_private=True)
        )

    async def complete(self, line: TranscriptionLine) -> Struct:
        """The answer. Raises as `SpeechToText.complete`, and ParameterError for a URL without a sound."""
        if line.stream:
            raise ParameterError("stream must not be true in a batch.", param="stream")
        if line.response_format not in _JSON_FORMATS:
            raise ParameterError(
                f"response_format {line.response_format} is no JSON, and a line of a batch is; take json or "
                "verbose_json.",
                param="response_format",
            )
        answer = await self._service.complete(line, await self._read(line.file_url))
        assert isinstance(answer, Struct)
        return answer

    async def _read(self, url: str) -> bytes:
        if url.startswith("data:"):
            return self._sized(_decode(url))
        data = bytearray()
        try:
            async with self._fetcher.get(url) as parts:
                async for part in parts:
                    data += part
        except FetchError as error:
            raise ParameterError(f"file_url was not fetched: {error}.", param="file_url") from None
        return bytes(data)

    def _sized(self, data: bytes) -> bytes:
        if len(data) > self._max_bytes:
            raise ParameterError(
                f"file_url has more than {self._max_bytes} bytes, the limit here (QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB).",
                param="file_url",
            )
        return data


def _decode(url: str) -> bytes:
    """The content of a data URL (RFC 2397)."""
    head, comma, content = url.partition(",")
    if not comma:
        raise ParameterError("file_url is a data URL without a comma before its data.", param="file_url")
    if not head.endswith(";base64"):
        return unquote_to_bytes(content)
    try:
        return b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise ParameterError("file_url is a data URL whose data is not base64.", param="file_url") from None
