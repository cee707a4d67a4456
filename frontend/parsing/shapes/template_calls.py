"""The calls of a response template as one of the shapes of calls, from which a grammar is made.

A template has patterns where a shape has markers. The shortest text that a pattern matches becomes the marker.
"""

import itertools
import json
import re
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as pattern_parser  # type: ignore[attr-defined]
from typing import Any

from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.json_calls import JsonCalls
from quire.frontend.parsing.shapes.named_calls import NamedCalls
from quire.frontend.parsing.shapes.xml_calls import XmlCalls

_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
_SPACES = {(codes.CATEGORY, codes.CATEGORY_SPACE)}
_PLACEHOLDER = re.compile(r"\{content\.(\w+)\}")
_BY_OPENER = {"name": "{name}", "arguments": "{content}"}


def call_shape(field: Any) -> CallShape | None:
    """The shape of the calls that a field describes; None if no shape writes them.

    Args:
        field: Transformers' `ResponseTemplateField`.
    """
    ends = _spellings(field.close_literals, field.close_re)
    function = field.transform.get("function") if isinstance(field.transform, dict) else None
    if not ends or field.transform_each or function is None:
        return None
    if function == _BY_OPENER:
        return _by_opener(field, ends[0])
    begins = _spellings(field.open_literals, field.open_re)
    if field.content != "json" or field.content_args or not begins:
        return None
    if function == "{content}":
        return JsonCalls(begin=(begins[0],), end=(ends[0],))
    keys = {name: _PLACEHOLDER.fullmatch(str(value)) for name, value in dict(function).items()}
    name, arguments = keys.pop("name", None), keys.pop("arguments", None)
    if keys or name is None or arguments is None or name[1] != "name":
        return None
    return JsonCalls(begin=(begins[0],), end=(ends[0],), arguments_key=arguments[1])


def _by_opener(field: Any, end: str) -> CallShape | None:
    """The shape of calls whose opener has the function's name."""
    around = _around(field.open_re, {"name": "get_weather"})
    if around is None:
        return None
    begin, name_end = around
    if field.content == "json" and not field.content_args:
        return NamedCalls(call_begin=begin, name_end=name_end, call_end=end)
    if field.content != "xml-inline" or field.content_args.get("merge_duplicates"):
        return None
    pattern = re.compile(field.content_args["tag_pattern"], re.DOTALL)
    parts = _around(pattern, {"key": "city", "value": "v"})
    if parts is None:
        return None
    key_begin, key_end, value_end = parts
    gap = "\n" if "\n" in begin + key_end + end else ""  # models that break lines within marks do so between them
    return XmlCalls(
        call_begin=begin,
        name_end=name_end.removesuffix("\n"),
        call_end=end.removeprefix("\n"),
        key_begin=key_begin,
        key_ends={key_end: ""},
        value_end=value_end,
        gap=gap,
    )


PROBE_NAME = "get_weather"
PROBE_ARGUMENTS = {"city": "5", "days": 3}
PROBE_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


def probe(shape: CallShape) -> str:
    """A call as a shape's grammar lets a model write it, to find out whether the template's parser reads it so."""
    arguments = json.dumps(PROBE_ARGUMENTS)
    match shape:
        case JsonCalls(begin=(begin,), end=(end,), arguments_key=key):
            return f'{begin}{{"name": "{PROBE_NAME}", "{key}": {arguments}}}{end}'
        case NamedCalls():
            return f"{shape.call_begin}{PROBE_NAME}{shape.name_end}{arguments}{shape.call_end}"
        case XmlCalls(key_ends=key_ends, gap=gap):
            [key_end] = key_ends
            written = [
                f"{shape.key_begin}{key}{key_end}{value}{shape.value_end}" for key, value in PROBE_ARGUMENTS.items()
            ]
            parts = (f"{shape.call_begin}{PROBE_NAME}{shape.name_end}", *written, shape.call_end)
            return gap.join(parts)
    raise TypeError(shape)


def trigger(field: Any) -> str:
    """The text with which every call of a field begins; empty if there is none."""
    if field.open_literals:
        pairs = zip(min(field.open_literals), max(field.open_literals), strict=False)
        return "".join(one for one, other in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    parsed = _without_spaces(pattern_parser.parse(field.open_re.pattern, re.DOTALL))
    return "".join(chr(each) for _, each in itertools.takewhile(lambda part: part[0] is codes.LITERAL, parsed))


def fits(field: Any, shape: CallShape, schemas: dict[str, dict[str, Any]]) -> bool:
    """True if the field's patterns read the names of these functions and of their arguments in the shape's markers."""
    if not isinstance(shape, NamedCalls | XmlCalls):
        return True
    for name, schema in schemas.items():
        match = field.open_re.fullmatch(f"{shape.call_begin}{name}{shape.name_end}")
        if match is None or match["name"] != name:
            return False
        if isinstance(shape, XmlCalls):
            [key_end] = shape.key_ends
            for key in schema.get("properties") or ():
                text = f"{shape.key_begin}{key}{key_end}v{shape.value_end}"
                match = re.fullmatch(field.content_args["tag_pattern"], text, re.DOTALL)
                if match is None or match["key"] != key:
                    return False
    return True


def _around(pattern: Any, samples: dict[str, str]) -> tuple[str, ...] | None:
    """The texts before, between and after the named groups, which stand in this order; None if no text is found."""
    pieces: list[list[Any]] = [[]]
    names = {index: name for name, index in pattern.groupindex.items()}
    try:
        parsed = list(pattern_parser.parse(pattern.pattern, re.DOTALL))
    except re.error:
        return None
    found = []
    for code, argument in parsed:
        if code is codes.SUBPATTERN and argument[0] in names:
            found.append(names[argument[0]])
            pieces.append([])
        else:
            pieces[-1].append((code, argument))
    if found != list(samples):
        return None
    pieces[0] = _without_spaces(pieces[0])
    for texts in itertools.product(*(_texts(piece) for piece in pieces)):
        whole = "".join(itertools.chain.from_iterable(zip(texts, [*samples.values(), ""], strict=True)))
        match = pattern.fullmatch(whole)
        if match is not None and match.groupdict() == samples:
            return texts
    return None


def _spellings(literals: list[str] | None, pattern: Any) -> list[str]:
    """Texts that a delimiter matches, the model's own spelling first."""
    if literals or pattern is None:
        return list(literals or ())
    try:
        parsed = list(pattern_parser.parse(pattern.pattern, re.DOTALL))
    except re.error:
        return []
    return [text for text in _texts(_without_spaces(parsed)) if text and pattern.fullmatch(text)]


def _without_spaces(parsed: Any) -> list[Any]:
    """A pattern without the optional white space before everything else."""
    return list(itertools.dropwhile(lambda part: part[0] in _REPEATS and _is_space(part[1][2]), parsed))


def _is_space(parsed: Any) -> bool:
    return len(parsed) == 1 and parsed[0][0] is codes.IN and set(parsed[0][1]) == _SPACES


def _texts(parsed: Any) -> list[str]:
    """The shortest text of a part of a pattern, and that with a space for each optional character."""
    return list(dict.fromkeys(text for other in ("", " ") if (text := _text(parsed, other)) is not None))


def _text(parsed: Any, other: str) -> str | None:
    """A text that a part of a pattern may match; None if it must match something that is not written in it.

    Optional white space is a line break, because the models of such templates write one; other optional characters
    are `other`.
    """
    written = []
    for code, argument in parsed:
        text: str | None = None
        if code is codes.LITERAL:
            text = chr(argument)
        elif code in _REPEATS:
            low, _, content = argument
            single = len(content) == 1 and content[0][0] in (codes.IN, codes.NOT_LITERAL, codes.ANY)
            rest = _text(content, other) if low else (other if single else "")
            text = "\n" if _is_space(content) else None if rest is None else rest * max(low, 1)
        elif code is codes.BRANCH:
            text = _text(argument[1][0], other)
        elif code is codes.SUBPATTERN:
            text = _text(argument[3], other)
        elif code is codes.AT and argument is codes.AT_BOUNDARY:
            text = ""
        if text is None:
            return None
        written.append(text)
    return "".join(written)
