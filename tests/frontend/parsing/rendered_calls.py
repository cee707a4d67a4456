"""Renders calls in a format, by its shape, as a model that keeps to the format writes them."""

import html
import json
from typing import Any

from quire.frontend.parsing.formats.harmony import Harmony
from quire.frontend.parsing.literals import Notation
from quire.frontend.parsing.shapes.attribute_calls import AttributeCalls
from quire.frontend.parsing.shapes.element_calls import ElementCalls
from quire.frontend.parsing.shapes.json_calls import JsonCalls
from quire.frontend.parsing.shapes.keyed_calls import KeyedCalls
from quire.frontend.parsing.shapes.named_calls import NamedCalls
from quire.frontend.parsing.shapes.python_calls import PythonCalls
from quire.frontend.parsing.shapes.xml_calls import XmlCalls

Call = tuple[str, dict[str, Any]]


def render(form: Any, calls: list[Call]) -> str:
    """`calls` in this format."""
    match form:
        case JsonCalls():
            return _render_json(form, calls)
        case KeyedCalls():
            objects = [json.dumps({name: arguments}, ensure_ascii=False) for name, arguments in calls]
            return f"{form.begin}[{', '.join(objects)}]{form.end}"
        case NamedCalls():
            return _render_named(form, calls)
        case XmlCalls():
            return _render_xml(form, calls)
        case PythonCalls():
            return _render_python(form, calls)
        case AttributeCalls():
            return _render_attributes(form, calls)
        case ElementCalls():
            return _render_elements(form, calls)
        case Harmony():
            return "".join(
                f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                f"{json.dumps(arguments, ensure_ascii=False)}<|call|>"
                for name, arguments in calls
            )
    raise TypeError(form)


def _render_json(form: JsonCalls, calls: list[Call]) -> str:
    objects = [
        json.dumps(
            ({form.number_key: str(index)} if form.number_key else {})
            | {form.name_key: name, form.arguments_key: arguments},
            ensure_ascii=False,
        )
        for index, (name, arguments) in enumerate(calls)
    ]
    begin, end = ("", "") if form.bare else (form.begin[0] + form.gap, form.gap + (*form.end, "")[0])
    if form.listed:
        return f"{begin}[{', '.join(objects)}]{end}"
    return (form.separator or "\n").join(f"{begin}{each}{end}" for each in objects)


def _render_named(form: NamedCalls, calls: list[Call]) -> str:
    rendered = []
    for index, (name, arguments) in enumerate(calls):
        text = _render_literal(arguments, form.notation) if form.notation else json.dumps(arguments, ensure_ascii=False)
        header = f"functions.{name}:{index}" if form.indexed else name
        rendered.append(
            f"{form.call_begin}{form.prefix}{header}{form.name_end}{text}{form.arguments_end}{form.call_end}"
        )
    begin, end = form.section or ("", "")
    return f"{begin}{form.separator.join(rendered)}{end}"


def _render_literal(value: Any, notation: Notation) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_render_literal(each, notation)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_render_literal(each, notation) for each in value) + "]"
    mark = notation.quotes[0]
    return f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value)


def _render_xml(form: XmlCalls, calls: list[Call]) -> str:
    before, after = form.section or ("", "")
    rendered = []
    for name, arguments in calls:
        inner = form.gap.join(_render_parameter(form, key, value) for key, value in arguments.items())
        text = f"{form.call_begin}{name}{form.name_end}{form.gap}{inner}{form.gap}{form.call_end}"
        rendered.append(form.wrapper[0] + text + form.wrapper[1])
    if not form.section:
        return "\n".join(rendered)
    if form.grouped or form.wrapper[0]:
        return form.gap.join([before, *rendered, after])
    return "\n".join(f"{before}\n{text}\n{after}" for text in rendered)


def _render_parameter(form: XmlCalls, key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    kind = "string" if isinstance(value, str) else "json"
    end = next((end for end, typing in form.key_ends.items() if typing == kind), next(iter(form.key_ends)))
    newline = "\n" if form.trim == "newline" else ""
    return f"{form.key_begin}{key}{end}{form.value_begin}{newline}{text}{newline}{form.value_end}"


def _render_attributes(form: AttributeCalls, calls: list[Call]) -> str:
    rendered = []
    for index, (name, arguments) in enumerate(calls, 1):
        number = f' {form.number}="{index}"' if form.number else ""
        text = f'{form.call.begin} {form.name}="{name}"{number}{form.call.header_end}{form.gap}'
        for key, value in arguments.items():
            kinds = {str: "string", bool: "boolean", int: "number", list: "array", dict: "object"}
            kind = f' {form.type}="{kinds[type(value)]}"' if form.type else ""
            body = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            body = html.escape(body, quote=False) if form.escaped else body
            text += f'{form.argument.begin} {form.key}="{key}"{kind}{form.argument.header_end}{body}{form.argument.end}'
            text += form.gap
        rendered.append(text + form.call.end)
    if not form.section:
        return form.gap.join(rendered)
    before, after = form.section
    return before + form.gap + form.gap.join(rendered) + form.gap + after


def _render_elements(form: ElementCalls, calls: list[Call]) -> str:
    def element(name: str, value: Any) -> str:
        if isinstance(value, dict):
            body = "".join(element(key, each) for key, each in value.items())
        elif isinstance(value, list):
            body = "".join(element("item", each) for each in value)
        else:
            body = value if isinstance(value, str) else json.dumps(value)
        return f"{form.namespace}<{name}>{body}{form.namespace}</{name}>"

    rendered = [
        f'{form.namespace}<invoke name="{name}">'
        + "".join(element(key, value) for key, value in arguments.items())
        + f"{form.namespace}</invoke>"
        for name, arguments in calls
    ]
    return "\n".join([form.triggers[0], *rendered, form.stray[0]])


def _render_python(form: PythonCalls, calls: list[Call]) -> str:
    rendered = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
    if form.begin and not form.bare and not form.echoed:
        return form.begin[0] + "\n".join(rendered) + form.end[0]
    begin, end = (form.begin[0], form.end[0]) if form.begin else ("", "")
    return f"{begin}[{', '.join(rendered)}]{end}"
