"""Merges two schemas for the same value into one, as `allOf`, or `$ref` with other keywords, needs it."""

from collections.abc import Callable
from typing import Any

from quire.frontend.grammar.pattern_notations import finds
from quire.frontend.grammar.schema import ANNOTATIONS, type_of, values_of

_HIGHER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_LOWER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_OBJECT = ("properties", "patternProperties", "additionalProperties")
_ARRAY = ("prefixItems", "items")
_GROUPS = (("if", "then", "else"), ("contains", "minContains", "maxContains"))
"""Keywords that depend on one another."""


class Unmergeable(Exception):
    """The two schemas cannot be one."""


def both(first: Any, second: Any) -> Any:
    """A schema with the meaning of two, to be merged when its place is normalized."""
    if first == second or second is True or second == {}:
        return first
    return second if first is True or first == {} else {"allOf": [first, second]}


def merged(first: Any, second: Any) -> Any:
    """One schema for two without `$ref`; keywords that cannot be combined stay in its `allOf`.

    Raises:
        Unmergeable: the schemas describe objects that one schema cannot describe.
    """
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second if first is True else first if second is True else False
    out = {**_only(second, ANNOTATIONS), **_only(first, ANNOTATIONS)}
    for keywords, merge in _MERGES:
        out |= _merge_some(_only(first, keywords), _only(second, keywords), merge)
    known = {*ANNOTATIONS, *(word for keywords, _ in _MERGES for word in keywords), "allOf"}
    rest, left = _merge_others(
        {word: each for word, each in first.items() if word not in known},
        {word: each for word, each in second.items() if word not in known},
    )
    left = [*(first.get("allOf") or ()), *(second.get("allOf") or ()), *left]
    out |= {**rest, **({"allOf": left} if left else {})}
    is_empty = out.get("type") == [] or out.get("enum") == []
    return False if is_empty else out


Part = dict[str, Any]


def _only(schema: Part, keywords: Any) -> Part:
    return {word: each for word, each in schema.items() if word in keywords and word not in ("$defs", "definitions")}


def _merge_some(first: Part, second: Part, merge: Callable[[Part, Part], Part]) -> Part:
    return merge(first, second) if first and second else first or second


def _merge_types(first: Part, second: Part) -> Part:
    mine, yours = (
        [kinds["type"]] if isinstance(kinds["type"], str) else list(kinds["type"]) for kinds in (first, second)
    )
    kinds = [kind for kind in mine if kind in yours or (kind == "integer" and "number" in yours)]
    kinds += [kind for kind in yours if kind == "integer" and "number" in mine and kind not in kinds]
    return {"type": kinds[0] if len(kinds) == 1 else kinds}


def _merge_values(first: Part, second: Part) -> Part:
    others = values_of(second) or []
    return {"enum": [value for value in values_of(first) or [] if any(_same(value, other) for other in others)]}


def _same(value: Any, other: Any) -> bool:
    return bool(value == other and type_of(value) == type_of(other))


def _merge_limits(choose: Callable[[Any, Any], Any]) -> Callable[[Part, Part], Part]:
    def merge(first: Part, second: Part) -> Part:
        both_have = {word: choose(first[word], second[word]) for word in first if word in second}
        return {**first, **second, **both_have}

    return merge


def _merge_required(first: Part, second: Part) -> Part:
    return {"required": list(dict.fromkeys([*first["required"], *second["required"]]))}


def _merge_objects(first: Part, second: Part) -> Part:
    for one, other in ((first, second), (second, first)):
        if one.get("patternProperties") and other.get("additionalProperties", True) not in (True, {}):
            raise Unmergeable
    names = dict.fromkeys([*first.get("properties", {}), *second.get("properties", {})])
    patterns = {**(first.get("patternProperties") or {})}
    for pattern, schema in (second.get("patternProperties") or {}).items():
        patterns[pattern] = both(patterns[pattern], schema) if pattern in patterns else schema
    out: Part = {"properties": {name: both(_of_name(name, first), _of_name(name, second)) for name in names}}
    if patterns:
        out["patternProperties"] = patterns
    others = [each["additionalProperties"] for each in (first, second) if "additionalProperties" in each]
    if others:
        out["additionalProperties"] = False if False in others else both(others[0], others[-1])
    for name, schema in list(out["properties"].items()):
        if isinstance(schema, dict) and False in schema.get("allOf", ()):
            out["properties"][name] = False
    return out


def _of_name(name: str, schema: Part) -> Any:
    """The schema of the property with a name, in an object's schema."""
    found = [schema["properties"][name]] if name in schema.get("properties", {}) else []
    found += [each for pattern, each in (schema.get("patternProperties") or {}).items() if _finds(pattern, name)]
    if not found:
        return schema.get("additionalProperties", True)
    return found[0] if len(found) == 1 else {"allOf": found}


def _finds(pattern: str, name: str) -> bool:
    found = finds(pattern, name)
    if found is None:
        raise Unmergeable
    return found


def _merge_arrays(first: Part, second: Part) -> Part:
    mine, yours = first.get("prefixItems", []), second.get("prefixItems", [])
    rest, others = first.get("items", True), second.get("items", True)
    out: Part = {}
    if mine or yours:
        out["prefixItems"] = [
            both(mine[i] if i < len(mine) else rest, yours[i] if i < len(yours) else others)
            for i in range(max(len(mine), len(yours)))
        ]
    if "items" in first or "items" in second:
        out["items"] = False if False in (rest, others) else both(rest, others)
    return out


_MERGES: tuple[tuple[tuple[str, ...], Callable[[Part, Part], Part]], ...] = (
    (("type",), _merge_types),
    (("enum", "const"), _merge_values),
    (_HIGHER, _merge_limits(max)),
    (_LOWER, _merge_limits(min)),
    (("required",), _merge_required),
    (_OBJECT, _merge_objects),
    (_ARRAY, _merge_arrays),
)


def _merge_others(first: Part, second: Part) -> tuple[Part, list[Part]]:
    """Merges the other keywords. Returns one schema without the second's clashing keywords, and a list of these."""
    out, left = dict(first), []
    for group in (*_GROUPS, *((word,) for word in second)):
        theirs = {word: second[word] for word in group if word in second}
        if not theirs or any(word in out and word not in first for word in theirs):
            continue
        if not any(word in first for word in group):
            out |= theirs
        elif any(first.get(word) != each for word, each in theirs.items()):
            if any(word.startswith("unevaluated") for word in theirs):
                raise Unmergeable
            left.append(theirs)
    return out, left
