"""Events of realtime transcriptions, as vLLM has them: JSON texts over a websocket."""

from typing import Any

import msgspec
from msgspec import Struct

from quire.frontend.audio.answers import TokenUsage
from quire.frontend.audio.schema import TranscriptionRequest


class SessionFields(Struct):
    """What a client says of its sounds, as in a request for a transcription."""

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    temperature: float | None = None
    seed: int | None = None
    max_completion_tokens: int | None = None

    def request(self) -> TranscriptionRequest:
        """The same as a request for a streamed transcription."""
        return TranscriptionRequest(stream=True, **msgspec.structs.asdict(self))


class SessionUpdate(SessionFields, tag_field="type", tag="session.update"):
    """Begins a session, or changes what holds for the clips that follow. The fields may be in `session` as well."""

    session: SessionFields | None = None


class AppendSound(Struct, tag_field="type", tag="input_audio_buffer.append"):
    """Adds samples: base64 of 16-bit little-endian integers, one channel at 16 kHz."""

    audio: str


class CommitSound(Struct, tag_field="type", tag="input_audio_buffer.commit"):
    """Ends an utterance. `final`: an answer comes even if there was no sound."""

    final: bool = False


class ClearSound(Struct, tag_field="type", tag="input_audio_buffer.clear"):
    """Forgets the samples that are not with the engine yet."""


ClientEvent = SessionUpdate | AppendSound | CommitSound | ClearSound


class SessionCreated(Struct, tag_field="type", tag="session.created"):
    """The first event."""

    id: str
    created: int


class TranscriptionDelta(Struct, tag_field="type", tag="transcription.delta"):
    """More of an utterance's text."""

    delta: str


class TranscriptionDone(Struct, tag_field="type", tag="transcription.done"):
    """The whole text of an utterance."""

    text: str
    usage: TokenUsage


class RealtimeError(Struct, tag_field="type", tag="error"):
    """What went wrong; the session goes on unless the connection is closed."""

    error: str
    code: str


ServerEvent = SessionCreated | TranscriptionDelta | TranscriptionDone | RealtimeError

_TYPES = tuple(each.__struct_config__.tag for each in (SessionUpdate, AppendSound, CommitSound, ClearSound))
_decode = msgspec.json.Decoder(ClientEvent).decode
_encode = msgspec.json.Encoder().encode


class EventError(Exception):
    """An event that cannot be read; `code` is vLLM's word for why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def read_event(text: str | bytes) -> ClientEvent:
    """Raises EventError."""
    try:
        return _decode(text)
    except msgspec.ValidationError as error:
        message, code = str(error), "invalid_event"
        if "$.type" in message or "field `type`" in message:
            message, code = f"{message}; events are of the types {', '.join(map(str, _TYPES))}", "unknown_event"
        raise EventError(f"{message}.", code) from None
    except msgspec.DecodeError as error:
        raise EventError(f"The message is no JSON: {error}.", "invalid_json") from None


def write_event(event: ServerEvent) -> str:
    """The event as JSON."""
    return _encode(event).decode()


def checked_request(event: SessionUpdate) -> TranscriptionRequest:
    """The request that an event makes of all clips."""
    fields: dict[str, Any] = msgspec.structs.asdict(event.session or SessionFields())
    for name in SessionFields.__struct_fields__:
        if (value := getattr(event, name)) not in (None, ""):
            fields[name] = value
    return SessionFields(**fields).request()
