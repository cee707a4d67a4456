"""Images, videos, sounds and files of a conversation: parts in protocols, in whose places templates get marks."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from quire.core.errors import ParameterError
from quire.core.wire.media import Modality
from quire.frontend.media.settings import Overrides
from quire.frontend.media.sources import Content, MediaPart, content_of, rows_of
from quire.frontend.requests.media_prompts import MediaPrompts
from quire.frontend.text.content_forms import MEDIA_TYPE, Placeholders

_FIELDS: dict[str, tuple[Modality, str]] = {
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image_pil": ("image", "image_pil"),
    "image_embeds": ("image", "image_embeds"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "input_audio"),
    "video_url": ("video", "video_url"),
    "file": ("image", "file"),
}
"""Types of parts: the kind of item, and the field that has it."""

_ORIGIN: Any = ("quire", "origin")
"""In a part that a protocol has translated: the type and the name of the part that the client sent, and its field. JSON
has no such key, so no client sends it."""


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


def file_part(data: Any, kind: str, name: str, field: str) -> dict[str, Any]:
    """A file of another protocol as a part of a message: an image, or a PDF; `data` is its address, or its data as one,
    and the rest is as for `image_part`."""
    return {"type": "file", "file": data, _ORIGIN: [kind, name, field]}


def refuse_media(messages: Sequence[Any]) -> None:
    """Raises ParameterError if a message has an image, a video or a sound."""
    for part, where in _media_in(messages):
        kind, at = part[_ORIGIN][:2] if _ORIGIN in part else (part["type"], where)
        raise ParameterError(f"{at} is of type {kind!r}, but this model reads text only.", param=at.partition("[")[0])


class Taken(NamedTuple):
    """A conversation whose items were taken out.

    Attributes:
        messages: with marks for the items.
        parts: the items, in order.
        placeholders: what stands for marks where a template reads contents as strings.
    """

    messages: list[Any]
    parts: Sequence[MediaPart] = ()
    placeholders: Placeholders = Placeholders()


async def take_media(messages: Sequence[Any], media: MediaPrompts | None, overrides: Overrides = Overrides()) -> Taken:
    """Takes the items out of a conversation.

    Args:
        media: reads them; None where the model reads text alone.
        overrides: the request's own settings.

    Raises:
        ParameterError: an item has no form that is read, or the model does not read such items.
        UnavailableError: the host is too busy.
    """
    if media is None:
        refuse_media(messages)
        return Taken(list(messages))
    given = [_read(part, where)._replace(overrides=overrides) for part, where in _media_in(messages)]
    if not given:
        return Taken(list(messages))
    groups = await media.reader.open(given)
    parts = [part for group in groups for part in group]
    facts = await media.reader.facts_of(parts)
    texts: dict[str, str] = {modality: each.placeholder for modality, each in facts.items()}
    return Taken(_marked(messages, groups), parts, Placeholders(texts, media.reader.interleaves))


def _marked(messages: Sequence[Any], groups: Sequence[Sequence[MediaPart]]) -> list[Any]:
    waiting = iter(groups)

    def marks(part: Any) -> list[Any]:
        if not _is_media(part):
            return [part]
        return [{"type": MEDIA_TYPE, "modality": each.modality} for each in next(waiting)]

    return [
        {**message, "content": [mark for part in message["content"] for mark in marks(part)]}
        if _has_parts(message)
        else message
        for message in messages
    ]


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
    elif field == "file":
        return MediaPart(modality, _of_file(part, value, param), param, is_file=True)
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


def _of_file(part: dict[str, Any], value: Any, param: str) -> str:
    """The address of a file, or its data as one."""
    if part.get("uuid") is not None:
        raise ParameterError(f"{param} has no uuid, because its pages are several items; leave it out.", param=param)
    if isinstance(value, str) and value and _ORIGIN in part:
        return _checked_file(value, param)
    if value is None and _ORIGIN in part:
        raise ParameterError(f"{param} must have an address or data.", param=param)
    fields = value if isinstance(value, dict) else {}
    if fields.get("file_id") is not None:
        raise ParameterError(f"{param} has a file_id, and no files are kept here; send its file_data.", param=param)
    data, name = fields.get("file_data"), fields.get("filename")
    if not isinstance(data, str) or not data or not isinstance(name, str | None):
        raise ParameterError(
            f'{param} must be an object such as {{"file_data": "data:application/pdf;base64,...", "filename": ...}}.',
            param=param,
        )
    return _checked_file(data if data[:5].lower() == "data:" else f"data:;base64,{data}", param)


def _checked_file(address: str, param: str) -> str:
    """An address of a file, unless it says that it is neither an image nor a PDF.

    Raises:
        ParameterError: it says so; `param` names it.
    """
    head = address.partition(",")[0].lower() if address[:5].lower() == "data:" else ""
    kind = head.removeprefix("data:").partition(";")[0].strip()
    if kind and not kind.startswith("image/") and kind not in _FILE_KINDS:
        raise ParameterError(f"{param} is of type {kind[:80]!r}; images and PDFs are read as files.", param=param)
    return address


_FILE_KINDS = ("application/pdf", "application/x-pdf", "application/octet-stream", "binary/octet-stream")
"""Types of files that are PDFs, or may be."""
