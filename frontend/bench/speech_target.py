"""Requests of a load for transcriptions: a form with a sound, whose text comes as a stream."""

from typing import Any

import httpx
import msgspec

from quire.frontend.bench.datasets.request import BenchRequest
from quire.frontend.bench.figures import RequestTiming
from quire.frontend.bench.text_target import time_stream

ENDPOINTS: dict[str, str] = {"openai-audio": "/v1/audio/transcriptions"}


class SpeechTarget(msgspec.Struct, frozen=True):
    """The server's URL and headers, and the fields of every request's form besides its sound."""

    url: str
    headers: dict[str, str]
    body: dict[str, Any]

    def fields_of(self, request: BenchRequest) -> dict[str, str]:
        """The texts of one request's form."""
        fields = self.body | {
            "max_completion_tokens": request.output_len,
            "stream": True,
            "stream_include_usage": True,
        }
        return {name: _as_text(value) for name, value in fields.items()}

    async def time(self, client: httpx.AsyncClient, request: BenchRequest) -> RequestTiming:
        """Sends a request, and returns its timing with the text that came."""
        assert request.sound is not None, "other requests are refused before"
        sound = request.sound
        timing = RequestTiming(prompt_tokens=0)
        stream = client.stream("POST", self.url, data=self.fields_of(request), files={"file": (sound.name, sound.data)})
        timing.prompt_tokens = await time_stream(stream, timing)
        return timing


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
