"""The sandbox of chat templates: Jinja's immutable sandbox, with limits on time, source and rendered text.

Templates are untrusted programs, and requests decide how often their loops run. Every loop and macro checks the time
limit, and every operation that may take long by itself is priced before it runs (`template_prices.py`).
"""

import functools
import json
import time
from collections.abc import Callable
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
from quire.frontend.text.template_bounds import Bounds, TemplateLimitError
from quire.frontend.text.template_prices import Prices

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
_VALUE = "_quire_value"


class _Clock:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = time.monotonic() + seconds

    def check(self) -> None:
        if time.monotonic() > self._ends_at:
            raise TemplateLimitError(f"it ran for more than {self._seconds:g} s; send a shorter conversation")


class SandboxedTemplate:
    """A compiled template.

    Args:
        bounds: of a single operation; `MAX_TEXT_CHARACTERS` and others if None.

    Raises:
        ParameterError: the source is not valid Jinja, or too long.
    """

    def __init__(self, source: str, bounds: Bounds | None = None) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ParameterError(
                f"The chat template has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are allowed.",
                param="chat_template",
            )
        self._prices = Prices(bounds or Bounds(MAX_TEXT_CHARACTERS))
        environment = _Sandbox(self._prices)
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
            self._prices.text(length)
            pieces.append(piece)
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Transformers' environment for chat templates, with the limits."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, prices: Prices) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
            finalize=self._shown,
        )
        self._prices = prices
        self.filters |= {"tojson": _tojson}
        self.filters = {name: prices.priced(name, each) for name, each in self.filters.items()}
        self.filters |= {_TICK: _tick, _CONCAT: self._concat, _VALUE: self._visited, "join": self._join}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]  # makes texts of unlimited length

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`. The common case, a key of a message, skips the lookup in the class."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left` operator `right`, if it does not cost too much."""
        self._prices.operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """`obj(*args, **kwargs)`, if it does not cost too much."""
        args = __self._prices.arguments(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A text's `format` or `format_map`, in the sandbox and priced; None for other values."""
        format_it = super().wrap_str_format(value)
        if format_it is None:
            return None

        @functools.wraps(format_it)
        def priced(*args: Any, **kwargs: Any) -> str:
            self._prices.format(value.__self__, args, kwargs)
            return format_it(*args, **kwargs)

        return priced

    def _shown(self, value: Any) -> Any:
        """A value that the template writes."""
        if type(value) is not str:
            self._prices.value(value)
        return value

    def _visited(self, value: Any) -> Any:
        """A value that is part of a new container, or compared."""
        if isinstance(value, (list, tuple, dict)):
            self._prices.value(value)
        return value

    def _concat(self, values: list[Any]) -> str:
        """The operator `~`."""
        self._prices.text(sum(map(self._prices.value, values)))
        return "".join(map(str, values))

    @jinja2.pass_eval_context
    def _join(self, context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        """The filter `join`."""
        return jinja2.filters.do_join(context, self._prices.join(self, value, d, attribute), d)


class _Watch(NodeTransformer):
    """Inserts a check of the clock into every loop and macro, and of the price into `~`, comparisons and containers."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._watch(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._watch(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._watch(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = self._priced_unless_constant(node.expr)
        for each in node.ops:
            each.expr = self._priced_unless_constant(each.expr)
        return node

    def _priced_unless_constant(self, value: nodes.Expr) -> nodes.Expr:
        return value if isinstance(value, nodes.Const) else _filtered(value, _VALUE)

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return node if all(isinstance(each, nodes.Const) for each in node.items) else _filtered(node, _VALUE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return node if all(isinstance(each.value, nodes.Const) for each in node.items) else _filtered(node, _VALUE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        if node.ctx != "load" or all(isinstance(each, nodes.Const) for each in node.items):
            return node
        return _filtered(node, _VALUE)

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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
