"""The server's OpenAPI document: Litestar's list of routes, with msgspec's schemas of the bodies.

Litestar's own schemas omit which fields are refused, and are ambiguous where a number may be a float.
"""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import msgspec
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.routes import HTTPRoute

BODY = "body"
"""Key in a handler's `opt` for the type of its body, if the handler decodes the body itself."""

FORM = "form"
"""The same for the type of a form's fields. Forms have a file beside them, in the field `file`."""

_REFERENCE = "#/components/schemas/{name}"


class _Place(NamedTuple):
    """A place in the document for a request's or answer's body. A body of several types has several places."""

    operation: dict[str, Any]
    holder: dict[str, Any]
    kind: Any
    is_form: bool = False


def openapi_document(app: Litestar, *, strict_fields: bool) -> dict[str, Any]:
    """The document of `app`, as JSON.

    Args:
        strict_fields: the server refuses unknown fields of bodies.
    """
    document = app.openapi_schema.to_schema()
    places = list(_places(app, document["paths"]))
    schemas, components = msgspec.json.schema_components([place.kind for place in places], ref_template=_REFERENCE)
    if not strict_fields:
        for component in components.values():
            component.pop("additionalProperties", None)
    document["components"]["schemas"] = components
    for place in places:
        place.holder.pop("content", None)
    for place, schema in zip(places, schemas, strict=True):
        if place.is_form:
            _content(place.holder)["multipart/form-data"] = {"schema": _with_file(schema, components)}
        else:
            _add(place.holder, schema)
    for operation in {id(place.operation): place.operation for place in places}.values():
        _complete(operation, components)
    return document


def _places(app: Litestar, paths: dict[str, Any]) -> Iterator[_Place]:
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        for handler in route.route_handlers:
            for method in handler.http_methods:
                operation = paths.get(route.path_format, {}).get(method.lower())
                if operation is not None:
                    yield from _places_of(handler, operation)


def _places_of(handler: HTTPRouteHandler, operation: dict[str, Any]) -> Iterator[_Place]:
    data = handler.parsed_data_field
    body = handler.opt.get(BODY) if data is None else data.annotation
    if body is not None:
        holder = operation.setdefault("requestBody", {"required": True})
        yield from (_Place(operation, holder, kind) for kind in _alternatives(body))
    if FORM in handler.opt:
        yield _Place(operation, operation.setdefault("requestBody", {"required": True}), handler.opt[FORM], True)
    answers: Mapping[int, ResponseSpec] = handler.responses or {}
    for status, answer in answers.items():
        if answer.data_container is not None:
            holder = operation["responses"][str(status)]
            yield from (_Place(operation, holder, kind) for kind in _alternatives(answer.data_container))


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, because msgspec describes no union of Structs."""
    return get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)


def _add(holder: dict[str, Any], schema: dict[str, Any]) -> None:
    content = _content(holder)
    known = content.get("application/json")
    content["application/json"] = {"schema": {"anyOf": [known["schema"], schema]} if known else schema}


def _with_file(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a form, of that of its fields."""
    fields = components[schema["$ref"].rsplit("/", 1)[1]]
    file = {"type": "string", "format": "binary"}
    return {
        **fields,
        "properties": {"file": file, **fields["properties"]},
        "required": ["file", *fields.get("required", ())],
    }


def _complete(operation: dict[str, Any], components: dict[str, Any]) -> None:
    """Adds the form that all errors share, and marks the answers that may be streams."""
    answers = operation["responses"]
    error = answers.get("400") or answers.get("503")
    if error is not None:
        answers["default"] = {**error, "description": "Any other error."}
    if _has_field(operation, components, "encoding_format"):
        plain = {"type": "string", "format": "binary", "description": "Vectors, with an encoding_format of bytes."}
        _content(answers["200"])["application/octet-stream"] = {"schema": plain}
    if _may_stream(operation, components):
        events = {"type": "string", "description": "Events, when `stream` is true."}
        _content(answers["200"])["text/event-stream"] = {"schema": events}


def _may_stream(operation: dict[str, Any], components: dict[str, Any]) -> bool:
    if any(parameter["name"] == "stream" for parameter in operation.get("parameters", ())):
        return True
    return _has_field(operation, components, "stream")


def _has_field(operation: dict[str, Any], components: dict[str, Any], field: str) -> bool:
    """Returns True if the operation's body may have a field."""
    content = operation.get("requestBody", {}).get("content", {})
    if field in content.get("multipart/form-data", {}).get("schema", {}).get("properties", {}):
        return True
    body = content.get("application/json", {}).get("schema", {})
    names = [each["$ref"].rsplit("/", 1)[1] for each in body.get("anyOf", [body]) if "$ref" in each]
    return any(field in components[name].get("properties", {}) for name in names)


def _content(holder: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = holder.setdefault("content", {})
    return content
