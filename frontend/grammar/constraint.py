"""A request's constraint as text: read from the request's parameters, with limits of size and depth."""

import hashlib
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.core.errors import ParameterError
from quire.core.wire.structured_outputs import ConstraintKind, StructuredOutputsParams

MAX_BYTES = 256 * 2**10
MAX_REGEX_BYTES = 16 * 2**10
MAX_CHOICES = 10_000
MAX_DEPTH = 64
"""Levels of objects and lists in a schema or structural tag."""

_DEFAULT_ORDER = ("xgrammar", "guidance")


class Constraint(Struct, array_like=True, frozen=True):
    """The text that an output must match, and the backends to try, in order.

    `text` is a JSON schema, a regular expression, a JSON list of choices, a grammar or a structural tag as JSON.
    """

    kind: ConstraintKind
    text: str
    backends: tuple[str, ...]
    any_whitespace: bool = True
    max_whitespace: int | None = None  # characters between two tokens of JSON
    whitespace_pattern: str | None = None
    closed: bool = False  # objects with `properties` allow no other properties

    @property
    def key(self) -> bytes:
        """A hash: constraints with equal keys compile to the same grammar."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


def read_constraint(params: StructuredOutputsParams, options: StructuredOutputsOptions) -> Constraint:
    """The constraint of a request; the server's `options` are the defaults.

    Raises:
        ParameterError: the constraint is too large, nested too deeply, or not valid JSON.
    """
    kind = params.kind
    field = f"structured_outputs.{kind}"
    text = _text(params, kind, field)
    limit = MAX_REGEX_BYTES if kind == "regex" else MAX_BYTES
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ParameterError(f"{kind} is not valid Unicode: it contains a lone surrogate.", param=field) from None
    if num_bytes > limit:
        raise ParameterError(f"{kind} has {num_bytes} bytes; at most {limit} are allowed.", param=field)
    backends = _backends(params, options, kind, text)
    return Constraint(
        kind=kind,
        text=text,
        backends=backends,
        any_whitespace=not (params.disable_any_whitespace or options.disable_any_whitespace),
        max_whitespace=options.max_whitespace,
        whitespace_pattern=params.whitespace_pattern,
        # XGrammar closes objects by default. If it is tried first, the other backends must not differ.
        closed=params.disable_additional_properties
        or options.disable_additional_properties
        or backends[0] == "xgrammar",
    )


def _text(params: StructuredOutputsParams, kind: ConstraintKind, field: str) -> str:
    value: Any = getattr(params, kind)
    if kind == "json_object":
        return ""
    if kind == "choice":
        if len(value) > MAX_CHOICES:
            raise ParameterError(f"choice has {len(value)} entries; at most {MAX_CHOICES} are allowed.", param=field)
        return _encoded(list(dict.fromkeys(value)), field)
    if kind in ("json", "structural_tag"):
        if isinstance(value, str):
            value = _decoded(value[: MAX_BYTES + 1] if len(value) > MAX_BYTES else value, kind, field)
        _check_depth(value, kind, field)
        if kind == "structural_tag" and not isinstance(value, dict):
            raise ParameterError("structural_tag must be an object.", param=field)
        if kind == "json" and not isinstance(value, (dict, bool)):
            raise ParameterError("json must be a JSON schema: an object.", param=field)
        return _encoded(value, field)
    return value


def _decoded(text: str, kind: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ParameterError(f"{kind} is nested more than {MAX_DEPTH} levels deep.", param=field) from None
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ParameterError(f"{kind} is not valid JSON of at most {MAX_BYTES} bytes: {error}.", param=field) from None


def _encoded(value: Any, field: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(f"{field.split('.')[-1]} cannot be written as JSON: {error}.", param=field) from None


def _check_depth(value: Any, kind: str, field: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise ParameterError(f"{kind} is nested more than {MAX_DEPTH} levels deep.", param=field)


def _backends(
    params: StructuredOutputsParams, options: StructuredOutputsOptions, kind: ConstraintKind, text: str
) -> tuple[str, ...]:
    chosen = params.backend or options.backend
    if chosen != "auto":
        return (chosen,)
    if options.disable_fallback:
        return _DEFAULT_ORDER[:1]
    if params.whitespace_pattern is not None or (kind == "grammar" and "::=" not in text):
        return _DEFAULT_ORDER[::-1]  # Lark's notation is llguidance's own
    return _DEFAULT_ORDER
