"""Bodies that are forms with a file (multipart/form-data, RFC 7578): fields as a Struct, and the file's bytes."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from litestar.exceptions import InternalServerException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from multipart import MultipartError, MultipartSegment, PushMultipartParser

from quire.core.errors import BodyTooLargeError, ParameterError
from quire.frontend.http.body_budget import release_charge
from quire.frontend.http.errors import ClientGoneError, MediaTypeError
from quire.frontend.http.json_request import IGNORED, JsonRequest
from quire.frontend.requests.deadline import HEADER, limit_time

MEDIA_TYPE = "multipart/form-data"
MAX_FIELDS_BYTES = 2**20
"""Most bytes of all fields but the file."""

_MAX_PARTS = 256
_MAX_HEADER_BYTES = 4096


class UploadedFile(NamedTuple):
    """A file of a form."""

    name: str
    data: bytes


class _Form:
    """Takes the parts of a form as they come."""

    def __init__(self, file_field: str, max_file_bytes: int, limit: str) -> None:
        self._file_field = file_field
        self._max_file_bytes = max_file_bytes
        self._limit = limit
        self._field_bytes = 0
        self._part: MultipartSegment | None = None
        self._content = bytearray()
        self.fields: dict[str, list[str]] = {}
        self.file: UploadedFile | None = None

    def begin(self, part: MultipartSegment) -> None:
        self._part, self._content = part, bytearray()
        if (part.name == self._file_field) != (part.filename is not None):
            raise ParameterError(
                f"{part.name!r} is a file in the form, but only {self._file_field} is one."
                if part.filename is not None
                else f"{self._file_field} must be a file with a name, not a text.",
                param=part.name,
            )
        if part.filename is not None and self.file is not None:
            raise ParameterError(f"The form has several files; send one as {self._file_field}.", param=part.name)

    def add(self, data: bytes | bytearray) -> None:
        self._content += data
        if self._is_file:
            self.check_size(len(self._content))
            return
        self._field_bytes += len(data)
        if self._field_bytes > MAX_FIELDS_BYTES:
            raise ParameterError(f"The form's fields have more than {MAX_FIELDS_BYTES} bytes beside the file.")

    def check_size(self, num_bytes: int) -> None:
        """Refuses a file of so many bytes if it is too large."""
        if num_bytes > self._max_file_bytes:
            raise ParameterError(
                f"{self._file_field} has more than {self._max_file_bytes} bytes, the limit here ({self._limit}); send "
                "a smaller one.",
                param=self._file_field,
            )

    def end(self) -> None:
        part = self._part
        assert part is not None
        if self._is_file:
            self.file = UploadedFile(part.filename, bytes(self._content))
        else:
            try:
                self.fields.setdefault(part.name, []).append(self._content.decode())
            except UnicodeDecodeError:
                raise ParameterError(f"{part.name} is not valid UTF-8.", param=part.name) from None
        self._part, self._content = None, bytearray()

    @property
    def _is_file(self) -> bool:
        return self._part is not None and self._part.filename is not None


async def read_form(
    request: JsonRequest, kind: Any, *, max_file_bytes: int, limit: str, file_field: str = "file"
) -> tuple[Any, UploadedFile]:
    """The form's fields as an object of type `kind`, and its file; the request's `timeout`, or the header's, begins.

    Numbers and truth values are read from texts. `kind.LISTS` are fields that may come several times, with `[]` behind
    their names or without, and `kind.OBJECTS` fields that are JSON.

    Args:
        limit: the variable that sets `max_file_bytes`.

    Raises:
        ParameterError: the form is malformed, too large, or a field is wrong.
        BodyTooLargeError: it is larger than a form with a file of `max_file_bytes` can be.
        MediaTypeError: the body is no form.
        ClientGoneError: the client closed the connection halfway.
    """
    form = _Form(file_field, max_file_bytes, limit)
    try:
        with PushMultipartParser(
            _boundary(request), max_header_size=_MAX_HEADER_BYTES, max_segment_count=_MAX_PARTS
        ) as parser:
            async for data in request.stream():
                for event in () if parser.closed else parser.parse(data):
                    if isinstance(event, MultipartSegment):
                        form.begin(event)
                    elif event:
                        form.add(event)
                    else:
                        form.end()
    except InternalServerException:  # Litestar's error for a client that is gone
        raise ClientGoneError("The client closed the connection while sending its request.") from None
    except RequestEntityTooLarge:
        raise BodyTooLargeError(
            f"The request body is larger than a form with a file of {max_file_bytes} bytes, the limit here ({limit}); "
            "send a smaller one.",
            param=file_field,
        ) from None
    except MultipartError as error:
        raise ParameterError(f"The request body is no valid form ({error}).") from None
    finally:
        release_charge(request.scope)
    body = json.dumps(_as_values(form.fields, kind)).encode()
    value, ignored = request.reader.read(body, kind)
    limit_time(request.headers.get(HEADER.lower()), getattr(value, "timeout", None))
    if ignored:
        cast("dict[str, Any]", request.scope)[IGNORED] = ignored
    if form.file is None:
        raise ParameterError(f"The field {file_field!r} is required: the sound, as a file.", param=file_field)
    return value, form.file


def _boundary(request: JsonRequest) -> str:
    kind, options = request.content_type
    if kind != MEDIA_TYPE:
        raise MediaTypeError(
            f"The body's Content-Type is {kind[:100] or 'missing'!r}; send a form, with the header Content-Type: "
            f"{MEDIA_TYPE}."
        )
    if not options.get("boundary"):
        raise ParameterError("The header Content-Type of a form needs a boundary.")
    return options["boundary"]


def _as_values(fields: Mapping[str, list[str]], kind: Any) -> dict[str, Any]:
    """The fields as the values of a JSON object, by `kind.LISTS` and `kind.OBJECTS`."""
    lists, objects = getattr(kind, "LISTS", ()), getattr(kind, "OBJECTS", ())
    found: dict[str, Any] = {}
    for name, values in fields.items():
        own = name.removesuffix("[]")
        if own in lists:
            found[own] = [*found.get(own, []), *values]
        elif len(values) > 1:
            raise ParameterError(f"{name} comes {len(values)} times in the form; send it once.", param=name)
        elif own in objects:
            try:
                found[own] = json.loads(values[0])
            except ValueError as error:
                raise ParameterError(f"{name} must be JSON in a text ({error}).", param=name) from None
        else:
            found[name] = values[0]
    return found
