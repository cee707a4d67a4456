"""The fields that constrain an answer's form: response_format, structured_outputs, and other dialects' names."""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import ParameterError
from quire.core.wire.structured_outputs import CONSTRAINT_KINDS, StructuredOutputsParams
from quire.frontend.chat.partly_read import PartlyRead

_FORMS: dict[Any, set[str]] = {
    "text": set(),
    "json_object": {"schema"},
    "json_schema": {"json_schema", "schema"},
    "structural_tag": {"format", "structures", "triggers"},
}
"""Fields of a response_format by its type."""

GUIDED_FIELDS = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's names before 0.11, and the present names."""

DIALECT_FIELDS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar"}
"""Names of SGLang and of llama-server, and the present names."""

_OLDER_FIELDS = {**GUIDED_FIELDS, **DIALECT_FIELDS}

GUIDED_OPTIONS = {"guided_decoding_backend": "_backend", "guided_whitespace_pattern": "whitespace_pattern"}


class JsonSchema(Struct, kw_only=True):
    """`json_schema` of a response_format. Every schema is followed strictly, with or without `strict`."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class OutputFields(PartlyRead, kw_only=True):
    """The fields of a request's body that constrain the form of its answer."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    def ignored_parts(self) -> Iterator[str]:
        """Unknown fields of response_format, and fields that structured_outputs overrules."""
        form = self.response_format or {}
        known = _FORMS.get(str(form.get("type")), set(form)) - ({"schema"} if "json_schema" in form else set())
        yield from (f"response_format.{name}" for name in form if name not in known and name != "type")
        schema = form.get("json_schema")
        if isinstance(schema, dict):
            known = set(JsonSchema.__struct_fields__)
            yield from (f"response_format.json_schema.{name}" for name in schema if name not in known)
        names = self._format_fields()
        if names and names[0] == "structured_outputs":
            with contextlib.suppress(ParameterError):  # which `read_format` raises
                yield from (name for name in names[1:] if not self._are_equal(names[0], name))

    @property
    def format_field(self) -> str | None:
        """The field that constrains the output; None when the output is free. structured_outputs overrules older names.

        Raises:
            ParameterError: several fields constrain the output, each in another way.
        """
        names = self._format_fields()
        for name in names[1:]:
            if names[0] != "structured_outputs" and not self._are_equal(names[0], name):
                raise ParameterError(f"{names[0]} and {name} contradict each other; leave one out.", param=name)
        if not names:
            for name in GUIDED_OPTIONS:
                if getattr(self, name) is not None:
                    raise ParameterError(f"{name} needs one of {', '.join(GUIDED_FIELDS)}.", param=name)
        return names[0] if names else None

    def _format_fields(self) -> list[str]:
        """All fields that constrain the output."""
        names = [name for name in ("structured_outputs", *_OLDER_FIELDS) if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.get("type") != "text":
            names.insert(0, "response_format")
        return names

    def _are_equal(self, first: str, second: str) -> bool:
        """True if two fields constrain the output in the same way. Clients of several servers send both."""
        one, other = self._read(first), self._read(second)
        return one.kind == other.kind and _decoded(getattr(one, one.kind)) == _decoded(getattr(other, one.kind))

    def read_format(self) -> StructuredOutputsParams | None:
        """The constraint on the output; None when the output is free.

        Raises:
            ParameterError: the constraint is contradictory or malformed, by field.
        """
        field = self.format_field
        return None if field is None else self._read(field)

    def _read(self, field: str) -> StructuredOutputsParams:
        if field == "response_format":
            assert self.response_format is not None
            return _read_response_format(self.response_format)
        if field == "structured_outputs":
            assert self.structured_outputs is not None
            return _convert({**self._options(), **self.structured_outputs}, StructuredOutputsParams, field)
        options = self._options() if field in GUIDED_FIELDS else {}
        return _convert({_OLDER_FIELDS[field]: getattr(self, field), **options}, StructuredOutputsParams, field)

    def _options(self) -> dict[str, str]:
        return {ours: value for name, ours in GUIDED_OPTIONS.items() if (value := getattr(self, name)) is not None}

    def format_names(self) -> dict[str, str]:
        """The client's name of the constraint, for errors about it."""
        field = self.format_field
        if field in (None, "structured_outputs"):
            return {}
        return {"structured_outputs": field, **{f"structured_outputs.{kind}": field for kind in CONSTRAINT_KINDS}}

    def chat_format_names(self) -> dict[str, str]:
        """As `format_names`, for a conversation: an answer without a format may be held to calls of its tools."""
        if self.format_field is None:
            return {f"structured_outputs.{kind}": "tools" for kind in ("json", "structural_tag")}
        return self.format_names()


def _read_response_format(form: dict[str, Any]) -> StructuredOutputsParams:
    kind = form.get("type")
    if kind == "json_schema" and "json_schema" in form:
        schema = _convert(form["json_schema"], JsonSchema, "response_format.json_schema").schema
        return StructuredOutputsParams(json=schema)
    if kind in ("json_object", "json_schema") and form.get("schema") is not None:  # as Together and llama-server
        return StructuredOutputsParams(json=_convert(form["schema"], dict[str, Any], "response_format.schema"))
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    given = _FORMS["structural_tag"] & set(form)
    if kind == "structural_tag" and given in ({"format"}, {"structures", "triggers"}):
        return StructuredOutputsParams(structural_tag={name: form[name] for name in ("type", *sorted(given))})
    raise ParameterError(
        "response_format must be one of {type: text}, {type: json_object}, {type: json_object, schema}, {type: "
        "json_schema, json_schema: {name, schema}}, {type: structural_tag, format} or {type: structural_tag, "
        "structures, triggers}.",
        param="response_format",
    )


def _decoded(value: Any) -> Any:
    """A value that a client may also send as JSON text."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return value


def _convert(value: Any, kind: type[Any], field: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ParameterError):
            cause = error.__cause__
            raise ParameterError(str(cause), param=cause.param if field == "structured_outputs" else field) from None
        text = str(error).replace("`$.", f"`{field}.")
        raise ParameterError(f"{field}: {text}.", param=field) from None
