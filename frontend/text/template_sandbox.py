"""The sandbox of chat templates: Jinja's immutable sandbox, with limits on time, source and rendered text.

Templates are untrusted programs, and requests decide how often their loops run. Every loop and macro checks the time
limit. Every operator that can make a long text out of short ones checks the length of its result first.
"""

import json
import re
import time
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from quire.core.errors import ParameterError

MAX_SOURCE_CHARACTERS = 256 * 1024
"""Longest template. The longest template of a known model has 40,000 characters."""
MAX_TEXT_CHARACTERS = 64 * 1024 * 1024
"""Longest text that a template may make, also as an intermediate result: several times any request body."""
MAX_SECONDS = 10.0
"""Time limit. A well-written template renders a conversation of eight megabytes in less than a second."""

_CLOCK = "_quire_clock"
_TICK = "_quire_tick"
_CONCAT = "_quire_concat"
_DICT_ATTRIBUTES = frozenset(dir(dict))
_MAX_FORMAT_WIDTH = re.compile(r"\d{6}|\*")


class TemplateLimitError(jinja2.TemplateError):
    """The template ran too long, or made too much text."""


class _Clock:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = time.monotonic() + seconds

    def check(self) -> None:
        if time.monotonic() > self._ends_at:
            raise TemplateLimitError(f"it ran for more than {self._seconds:g} s; send a shorter conversation")


class SandboxedTemplate:
    """A compiled template.

    Raises:
        ParameterError: the source is not valid Jinja, or too long.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ParameterError(
                f"The chat template has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are allowed.",
                param="chat_template",
            )
        environment = _Sandbox()
        try:
            compiled = environment.compile(_Watch().visit(environment.parse(source)))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ParameterError(f"The chat template is no valid Jinja: {error}.", param="chat_template") from None
        self._template = jinja2.Template.from_code(environment, compiled, environment.make_globals(None))

    def render(self, variables: dict[str, Any], *, seconds: float | None = None) -> str:
        """Renders the template, within a time limit: `MAX_SECONDS` if None.

        Raises:
            Exception: the template may raise anything.
        """
        pieces, length = [], 0
        clock = _Clock(MAX_SECONDS if seconds is None else seconds)
        for piece in self._template.generate({**variables, _CLOCK: clock}):
            length += len(piece)
            if length > MAX_TEXT_CHARACTERS:
                _check_length(length)
            pieces.append(piece)
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Transformers' environment for chat templates, with the limits."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        self.filters |= {"tojson": _tojson, "center": _center, "indent": _indent, "format": _format}
        self.filters |= {_TICK: _tick, _CONCAT: _concat}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]  # makes texts of unlimited length

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`. The common case, a key of a message, skips the lookup in the class."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left` operator `right`, if the result is not too long."""
        if operator == "+" and isinstance(left, (str, list)) and isinstance(right, (str, list)):
            _check_length(len(left) + len(right))
            return left + right  # type: ignore[operator]  # a string and a list are the template's mistake
        elif operator == "*":
            _check_product(left, right)
            _check_product(right, left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_length(left.bit_length() * abs(right) // 8)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)


class _Watch(NodeTransformer):
    """Inserts a check of the clock into every loop and macro, and a check of the length into `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._watch(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._watch(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._watch(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def _watch(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = _filtered(nodes.Const(None, lineno=node.lineno), _TICK)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node


def _filtered(value: nodes.Expr, name: str) -> nodes.Filter:
    """A call of a filter: only functions go through Jinja's sandbox, which takes ten times as long."""
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks the assistant's text for training, and is ignored here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# ---------------------------------------------------------------------------------------------- filters and functions


@jinja2.pass_context
def _tick(context: Context, _: None) -> None:
    """Checks the clock, in each iteration of a loop and each call of a macro."""
    context.parent[_CLOCK].check()


def _concat(values: list[Any]) -> str:
    """The operator `~`."""
    texts = [str(value) for value in values]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    if indent is not None:
        _check_length(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _center(value: str, width: int = 80) -> str:
    _check_length(width)
    return jinja2.filters.do_center(value, width)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_length((width if isinstance(width, int) else len(width)) * (text.count("\n") + 1))
    return jinja2.filters.do_indent(text, width, first, blank)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value)
    return jinja2.filters.do_format(value, *args, **kwargs)


def _check_length(length: int) -> None:
    if length > MAX_TEXT_CHARACTERS:
        raise TemplateLimitError(f"it makes a text of more than {MAX_TEXT_CHARACTERS} characters")


def _check_product(sequence: Any, count: Any) -> None:
    if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
        _check_length(len(sequence) * count)


def _check_format(layout: str) -> None:
    if "%" in layout and _MAX_FORMAT_WIDTH.search(layout):
        raise TemplateLimitError("a format has too large a width")
