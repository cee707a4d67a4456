"""Images, videos and sounds of a conversation: parts in protocols, of which templates get marks in their places."""

from collections.abc import Iterator, Sequence
from typing import Any

from quire.core.errors import ParameterError
from quire.core.wire.media import Modality
from quire.frontend.media.sources import Content, MediaPart, content_of, rows_of
from quire.frontend.text.content_forms import MEDIA_TYPE

_FIELDS: dict[str, tuple[Modality, str]] = {
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image_pil": ("image", "image_pil"),
    "image_embeds": ("image", "image_embeds"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "input_audio"),
    "video_url": ("video", "video_url"),
}
"""Types of parts: the kind of item, and the field that has it."""

_ORIGIN = "quire.origin"
"""In a part that a protocol has translated: the type and the name of the part that the client sent, and its field."""


def image_part(url: Any, kind: str, name: str, field: str) -> dict[str, Any]:
    """An image of another protocol as a part of a message.

    Args:
        url: its address, or its data as one.
        kind: the type of the client's part.
        name: where that is in the request.
        field: of that part, which has the address.
    """
    return {"type": "image_url", "image_url": url, _ORIGIN: [kind, name, field]}


def audio_part(data: Any, kind: str, name: str, field: str) -> dict[str, Any]:
    """A sound of another protocol as a part of a message; `data` has its bytes and format, and the rest is as for
    `image_part`."""
    return {"type": "input_audio", "input_audio": data, _ORIGIN: [kind, name, field]}


def refuse_media(messages: Sequence[Any]) -> None:
    """Raises ParameterError if a message has an image, a video or a sound."""
    for part, where in _media_in(messages):
        kind, at = part[_ORIGIN][:2] if _ORIGIN in part else (part["type"], where)
        raise ParameterError(f"{at} is of type {kind!r}, but this model reads text only.", param=at.partition("[")[0])


def take_media(messages: Sequence[Any]) -> tuple[list[Any], list[MediaPart]]:
    """Returns the messages with marks for images, videos and sounds, and these in order.

    Raises:
        ParameterError: one has no form that is read.
    """
    parts = [_read(part, where) for part, where in _media_in(messages)]
    if not parts:
        return list(messages), []
    waiting = iter(parts)

    def marked(part: Any) -> Any:
        return {"type": MEDIA_TYPE, "modality": next(waiting).modality} if _is_media(part) else part

    changed = [
        {**message, "content": [marked(part) for part in message["content"]]} if _has_parts(message) else message
        for message in messages
    ]
    return changed, parts


def _media_in(messages: Sequence[Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields parts that are images, videos or sounds, each with its name."""
    for number, message in enumerate(messages):
        if _has_parts(message):
            for index, part in enumerate(message["content"]):
                if _is_media(part):
                    yield part, f"messages[{number}].content[{index}]"


def _has_parts(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), list)


def _is_media(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _FIELDS


def _read(part: dict[str, Any], where: str) -> MediaPart:
    modality, field = _FIELDS[part["type"]]
    value, uuid = part.get(field), part.get("uuid")
    param = ".".join(part[_ORIGIN][1:]) if _ORIGIN in part else f"{where}.{field}"
    if uuid is not None and (not isinstance(uuid, str) or not uuid):
        raise ParameterError(f"{where}.uuid must be a string that is not empty.", param=f"{where}.uuid")
    source: Any = value or None
    if field == "image_pil" and value is not None:
        source = content_of(modality, value, param)
    elif field == "image_embeds" and source is not None:
        source = rows_of(value, param)
    elif field == "input_audio" and source is not None:
        source = _data_url(source, param)
    elif isinstance(value, dict):
        source = value.get("url") or None
    if source is not None and not isinstance(source, str | Content):
        raise ParameterError(f"{param} must be an address, or an object with its url.", param=param)
    if source is None and uuid is None:
        raise ParameterError(f"{param} must have an address or data, or the part a uuid.", param=param)
    return MediaPart(modality, source, param, uuid)


def _data_url(value: Any, param: str) -> str:
    """The sound of an `input_audio`, as an address. The file itself says what its format is."""
    fields = value if isinstance(value, dict) else {}
    data, form = fields.get("data"), fields.get("format", "wav")
    if not isinstance(data, str) or not isinstance(form, str):
        raise ParameterError(
            f'{param} must be an object such as {{"data": ..., "format": "wav"}}, its data in base64.', param=param
        )
    return f"data:audio/{form};base64,{data}"
