"""Request bodies: JSON decoded straight into the handler's Struct, with errors that name the field or the position."""

import asyncio
import functools
import re
from typing import Any, ClassVar, NoReturn, cast

import msgspec
from litestar import Request
from litestar.exceptions import InternalServerException

from quire.core.errors import ParameterError
from quire.frontend.chat.partly_read import PartlyRead
from quire.frontend.http.body_budget import release_charge
from quire.frontend.http.errors import ClientGoneError, MediaTypeError
from quire.frontend.http.field_values import allowed_values
from quire.frontend.http.unknown_fields import IgnoredFields, IgnoredFieldsLog, nearest, without_unknown
from quire.frontend.requests.deadline import HEADER, limit_time

MEDIA_TYPE = "application/json"
MAX_QUOTED = 1000
"""Characters of a client's text that an error reads and quotes, from either end."""

LARGE_BODY = 1 << 20
"""Bytes from which bodies are decoded one at a time, between other work of the loop."""

IGNORED = "quire.ignored_fields"
"""Key in a request's ASGI scope for its IgnoredFields, if it has any."""

_SCALAR_IN_ANOTHER_FORM = re.compile(r"Expected `.*\b(int|float|bool)\b.*`, got `(str|int|float)`")
_PATH = re.compile(r"^(?P<text>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)


@functools.cache
def decoder_for(kind: Any) -> msgspec.json.Decoder[Any]:
    """One decoder for each body type."""
    return msgspec.json.Decoder(kind)


class BodyReader:
    """Reads the bodies of requests.

    Args:
        strict: refuse fields and parts that would be ignored.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._log = IgnoredFieldsLog()
        self._turn = asyncio.Lock()

    async def read_in_turn(self, body: bytes, kind: Any) -> tuple[Any, IgnoredFields]:
        """Runs `read`. Large bodies wait for one another, and leave the loop to other work in between."""
        if len(body) < LARGE_BODY:
            return self.read(body, kind)
        async with self._turn:
            await asyncio.sleep(0)
            return self.read(body, kind)

    def read(self, body: bytes, kind: Any) -> tuple[Any, IgnoredFields]:
        """`body` as an object of type `kind`, and the fields that were ignored.

        Raises:
            ParameterError: as for `decode_body`, or a field that `strict` refuses.
        """
        ignored = IgnoredFields()
        value = decode_body(body, kind, None if self._strict else ignored)
        if isinstance(value, PartlyRead):
            for part in value.ignored_parts():
                if self._strict:
                    raise ParameterError(
                        f"{part} would be ignored by this server, and its --strict-fields refuses what would be; "
                        "leave it out.",
                        param=re.split(r"[.\[]", part)[0],
                    )
                ignored.add(part)
        if ignored:
            self._log.add(ignored, kind)
        return value, ignored


class JsonRequest(Request[Any, Any, Any]):
    """A request whose `data` argument is decoded straight into a Struct, without a dictionary in between."""

    reader: ClassVar[BodyReader]

    async def body(self) -> bytes:
        """The whole body, which must be declared as JSON: a browser sends other types for pages of any origin, without
        asking this server first.

        Raises:
            ClientGoneError: the client closed the connection halfway.
            MediaTypeError: there is a body, and it is not declared to be JSON, or compressed.
        """
        try:
            body = await super().body()
        except InternalServerException:  # Litestar's error for a client that is gone
            raise ClientGoneError("The client closed the connection while sending its request.") from None
        if body:
            self._check_media_type()
        return body

    def _check_media_type(self) -> None:
        told = self.headers.get("content-type", "")
        if told.partition(";")[0].strip().lower() != MEDIA_TYPE:
            raise MediaTypeError(
                f"The body's Content-Type is {told[:MAX_QUOTED] or 'missing'!r}; send JSON, with the header "
                f"Content-Type: {MEDIA_TYPE}."
            )
        coding = self.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise MediaTypeError(f"Bodies with Content-Encoding {coding[:MAX_QUOTED]!r} are not read; send plain JSON.")

    async def json(self) -> Any:
        """The body as the type that the handler declares for `data`."""
        field = self.route_handler.parsed_data_field
        assert field is not None
        return await self.read(field.annotation)

    async def take_body(self) -> bytes:
        """The whole body, which the request drops: an open connection holds its last request."""
        body = await self.body()
        self._body = self._connection_state.body = b""
        return body

    async def read(self, kind: Any) -> Any:
        """The body, which is taken, as an object of type `kind`; its `timeout`, or the header's, begins. Raises
        ParameterError."""
        try:
            value, ignored = await self.reader.read_in_turn(await self.take_body(), kind)
        finally:
            release_charge(self.scope)
        limit_time(self.headers.get(HEADER.lower()), getattr(value, "timeout", None))
        if ignored:
            cast("dict[str, Any]", self.scope)[IGNORED] = ignored
        return value


def requests_read_by(reader: BodyReader) -> type[JsonRequest]:
    """The class of an application's requests, whose bodies `reader` reads."""
    return type("ReadRequest", (JsonRequest,), {"reader": reader})


def decode_body(body: bytes, kind: Any, ignored: IgnoredFields | None = None) -> Any:
    """`body` as an object of type `kind`.

    Args:
        ignored: gets the unknown fields; None refuses them.

    Raises:
        ParameterError: `body` is not JSON (with the position), or not of type `kind` (with the field).
    """
    try:
        return _decode(body, kind, ignored)
    except msgspec.ValidationError as error:
        _refuse(str(error), kind)
    except UnicodeDecodeError:
        raise ParameterError(f"The request body is not valid UTF-8{_first_bad_byte(body)}.") from None
    except msgspec.DecodeError as error:
        raise ParameterError(f"The request body is not valid JSON: {_complaint(error, body)}.") from None
    except RecursionError:
        raise ParameterError("The request body is nested too deeply.") from None


def _decode(body: bytes, kind: Any, ignored: IgnoredFields | None) -> Any:
    """Decodes `body`. A number or a boolean may have another form: `2.0`, `"0.7"`, `"True"`, or 1 for true.

    Some languages can only send 2.0, and clients built from forms send strings. The first decoder refuses these forms
    and unknown fields; only a body that has some is decoded a second time.
    """
    try:
        return decoder_for(kind).decode(body)
    except msgspec.ValidationError as error:
        is_unknown = ignored is not None and _UNKNOWN.match(str(error))
        if not is_unknown and not _SCALAR_IN_ANOTHER_FORM.match(str(error)):
            raise
    value = msgspec.json.decode(body)
    if ignored is not None:
        value = without_unknown(value, kind, ignored)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if not _SCALAR_IN_ANOTHER_FORM.match(str(error)):
            raise
    return msgspec.convert(value, kind, strict=False)


def _refuse(text: str, kind: Any) -> NoReturn:
    if len(text) > 2 * MAX_QUOTED:  # the text quotes the name of an unknown field
        text = f"{text[:MAX_QUOTED]} ... {text[-MAX_QUOTED:]}"
    match = _PATH.match(text)
    assert match is not None
    complaint, path = match["text"], match["path"] or ""
    if unknown := _UNKNOWN.match(complaint):
        name = unknown["name"]
        raise ParameterError(
            f"Unknown field {_join(path, name)!r}.{'' if path else nearest(name, kind)}", param=_join(path, name)
        )
    if missing := _MISSING.match(complaint):
        name = _join(path, missing["name"])
        raise ParameterError(f"The field {name!r} is required.", param=name)
    complaint = _lower(complaint).replace("`", "")
    if complaint.startswith("invalid enum value") and (values := allowed_values(kind, path)):
        complaint += f"; take {', '.join(values[:-1])} or {values[-1]}" if len(values) > 1 else f"; take {values[0]}"
    raise ParameterError(f"{path or 'The request body'}: {complaint}.", param=path or None)


def _first_bad_byte(body: bytes) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f" (byte {error.start})"
    return ""


def _complaint(error: msgspec.DecodeError, body: bytes) -> str:
    """msgspec's message, or a better one for the two usual mistakes of clients."""
    text = str(error).removeprefix("JSON is malformed: ")
    if re.search(rb"[:,\[]\s*-?(NaN|Infinity)\b", body):
        return f"{text}; NaN and Infinity are not JSON numbers"
    if re.search(rb"\\u[dD][89a-fA-F]", body):
        return "a \\ud800 to \\udfff escape must be half of a surrogate pair"
    return _lower(text)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:] if text.startswith(("Expected", "Input", "Invalid", "Number")) else text
