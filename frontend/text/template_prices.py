"""What the operations of a chat template cost, computed before they run.

A single operation in C cannot be interrupted, so no clock ends it: a power, a text of a given width, a table of a
translation. Each of those that make much of little, or that visit a value many times, is checked against `Bounds`
first. All others cost no more than their operands.
"""

import functools
import re
import string
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2.filters import make_attrgetter

from quire.frontend.text.template_bounds import Measures, TemplateLimitError

MAX_DECIMALS = 400
"""Decimal places beyond which a float has none."""

_JINJAS = frozenset({"_loop_vars", "_block_vars"})
"""Arguments that compiled templates add to calls."""
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*))?")
_NUMBER = re.compile(r"\d+")


class Prices(Measures):
    """Checks operations. Methods raise TemplateLimitError when one would cost too much."""

    # ------------------------------------------------------------------------------------------------------ operators

    def operator(self, operator: str, left: Any, right: Any) -> None:
        """`left` operator `right`."""
        match operator:
            case "+" if isinstance(left, str) and isinstance(right, str):
                self.text(len(left) + len(right))
            case "+" if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                self.items(len(left) + len(right))
            case "*" if isinstance(left, int) and isinstance(right, int):
                self.bits(left.bit_length() + right.bit_length())
            case "*":
                self._product(left, right)
                self._product(right, left)
            case "**" if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
                self.bits(left.bit_length() * abs(right))
            case "%" if isinstance(left, str):
                self.percent(left, right if isinstance(right, (tuple, Mapping)) else (right,))

    def _product(self, sequence: Any, count: Any) -> None:
        if not isinstance(count, int):
            return
        if isinstance(sequence, (str, bytes)):
            self.text(len(sequence) * count)
        elif isinstance(sequence, (list, tuple)):
            self.items(len(sequence) * count)

    def percent(self, layout: str, values: Mapping[str, Any] | tuple[Any, ...]) -> None:
        """`layout % values`."""
        specs = _PERCENT.findall(layout)
        self.widths(number for spec in specs for number in spec)
        self._filled(layout, len(specs), values.values() if isinstance(values, Mapping) else values)

    def widths(self, numbers: Iterable[str]) -> None:
        """Fields of these widths, in digits; `*` and `{` take one from a value, whose size nobody knows here."""
        total = 0
        for number in numbers:
            if number[:1] in ("*", "{"):
                raise TemplateLimitError("a format takes its width from a value; write the width into the format")
            total += int(number[:20] or 0)
        self.text(total)

    def _filled(self, layout: str, num_fields: int, values: Iterable[Any]) -> None:
        longest = max((self.value(each) for each in values), default=0)
        self.text(len(layout) + num_fields * longest)

    # -------------------------------------------------------------------------------------------------------- methods

    def arguments(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Checks a call of a method of a text, a number or a container; returns its positional arguments, in which an
        iterator may have become a list."""
        if not isinstance(method, BuiltinMethodType):
            return args
        of, name = method.__self__, method.__name__
        kwargs = {key: each for key, each in kwargs.items() if key not in _JINJAS}
        if isinstance(of, (str, bytes)):
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
                self.text(sum(len(each) + len(of) for each in args[0] if isinstance(each, (str, bytes))))
            elif (price := _TEXT_METHODS.get(name)) is not None:
                price(self, of, *args, **kwargs)
        elif isinstance(of, int) and name == "to_bytes":
            self.text(int(kwargs.get("length", args[0] if args else 1)))
        return args

    def format(self, layout: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """`layout.format(*args, **kwargs)`."""
        kwargs = {key: each for key, each in kwargs.items() if key not in _JINJAS}
        specs = [spec or "" for _, field, spec, _ in string.Formatter().parse(layout) if field is not None]
        self.widths(number for spec in specs for number in ("{" in spec and ["{"]) or _NUMBER.findall(spec))
        self._filled(layout, len(specs), [*args, *kwargs.values()])

    # -------------------------------------------------------------------------------------------------------- filters

    def priced(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is checked before it runs."""
        price = _FILTERS.get(name)
        if price is None:
            return function
        first = 0 if getattr(function, "jinja_pass_arg", None) is None else 1  # behind what Jinja passes

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            price(self, *args[first:], **kwargs)
            return function(*args, **kwargs)

        return checked

    def join(
        self, environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
    ) -> list[Any]:
        """Checks the filter `join`; returns its items."""
        found = list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
        self.text(self.value(found) + len(str(d)) * len(found))
        return found


def _width(prices: Prices, text: str | bytes, width: int = 80, *_: Any) -> None:
    prices.text(width)


def _tabs(prices: Prices, text: str | bytes, tabsize: int = 8) -> None:
    prices.text(len(text) + text.count("\t" if isinstance(text, str) else b"\t") * tabsize)  # type: ignore[arg-type]


def _replace(prices: Prices, text: Any, old: Any, new: Any, count: int | None = -1) -> None:
    text = text if isinstance(text, (str, bytes)) else str(text)
    most = text.count(old)
    prices.text(len(text) + (most if count is None or count < 0 else min(most, count)) * max(0, len(new) - len(old)))


def _translate(prices: Prices, text: str | bytes, table: Any, *_: Any) -> None:
    values = table.values() if isinstance(table, Mapping) else table if isinstance(table, (list, tuple)) else ()
    longest = max((len(each) for each in values if isinstance(each, str)), default=1)
    prices.text(len(text) * longest)


def _split(prices: Prices, text: Any, sep: Any = None, maxsplit: int = -1) -> None:
    if maxsplit < 0:
        prices.items(_count(text, string.whitespace + "\x85\xa0\u2028\u2029\u3000") if sep is None else text.count(sep))


def _split_lines(prices: Prices, text: Any, keepends: bool = False) -> None:
    prices.items(_count(text, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))


def _count(text: str | bytes, characters: str) -> int:
    if isinstance(text, bytes):
        return sum(text.count(each.encode()) for each in characters)
    return sum(map(text.count, characters))


_TEXT_METHODS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("zfill", "ljust", "rjust", "center"), _width),
    "expandtabs": _tabs,
    "replace": _replace,
    "translate": _translate,
    **dict.fromkeys(("split", "rsplit"), _split),
    "splitlines": _split_lines,
}


def _batch(prices: Prices, value: Any, linecount: int, fill_with: Any = None) -> None:
    prices.items(linecount if fill_with is not None else 0)


def _slice(prices: Prices, value: Any, slices: int, fill_with: Any = None) -> None:
    prices.items(slices)


def _round(prices: Prices, value: Any, precision: int = 0, method: str = "common") -> None:
    if abs(precision) > MAX_DECIMALS:
        raise TemplateLimitError(f"it rounds to more than {MAX_DECIMALS} places")


def _int(prices: Prices, value: Any, default: int = 0, base: int = 10) -> None:
    if isinstance(value, str):
        prices.bits(len(value) * max(1, base.bit_length() - 1))


def _list(prices: Prices, value: Any) -> None:
    prices.items(len(value) if isinstance(value, str) else 0)


def _indent(prices: Prices, text: str, width: int | str = 4, *_: Any, **__: Any) -> None:
    prices.text(len(text) + (width if isinstance(width, int) else len(width)) * (text.count("\n") + 1))


def _wordwrap(
    prices: Prices, text: str, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, *_: Any
) -> None:
    prices.text(len(text) + (len(text) // max(1, width) + text.count("\n") + 1) * len(wrapstring or "\n"))


def _sum(prices: Prices, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, (int, float)):
        raise TemplateLimitError("it sums up what are no numbers; use +")


def _tojson(
    prices: Prices, value: Any, ensure_ascii: bool = False, indent: int | None = None, *_: Any, **__: Any
) -> None:
    length = prices.value(value)
    prices.text(length * max(1, indent or 1))


def _format(prices: Prices, layout: str, *args: Any, **kwargs: Any) -> None:
    prices.percent(layout, kwargs or args)


def _text(prices: Prices, value: Any, *_: Any, **__: Any) -> None:
    prices.value(value)


_FILTERS: dict[str, Callable[..., None]] = {
    "batch": _batch,
    "slice": _slice,
    "round": _round,
    "int": _int,
    "list": _list,
    "indent": _indent,
    "center": _width,
    "wordwrap": _wordwrap,
    "sum": _sum,
    "tojson": _tojson,
    "format": _format,
    "replace": _replace,
    **dict.fromkeys(
        (
            *("string", "upper", "lower", "capitalize", "title", "trim", "striptags", "e", "escape", "forceescape"),
            *("urlencode", "urlize", "pprint", "wordcount", "truncate", "xmlattr", "safe", "dictsort", "unique"),
        ),
        _text,
    ),
}
