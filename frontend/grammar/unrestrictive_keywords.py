"""Keywords whose values restrict nothing. A schema without them allows the same, and more libraries accept it."""

from typing import Any

from quire.frontend.grammar.merging import both
from quire.frontend.grammar.pattern_notations import finds, finds_all, names_of
from quire.frontend.grammar.schema import ANNOTATIONS, type_of, types_of, values_of

_TYPES = {
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": (
        *("items", "prefixItems", "contains", "minContains", "maxContains", "minItems", "maxItems", "uniqueItems"),
        "unevaluatedItems",
    ),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "minProperties", "maxProperties"),
        *("required", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    ),
}
"""Keywords that hold for values of one type."""

_ZERO = ("minLength", "minItems", "minProperties")
_EMPTY = ("required", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies")
_MAX_NAMES = 64
"""Names that a pattern may allow to be written as properties."""

Part = dict[str, Any]


def is_anything(schema: Any) -> bool:
    """True if the schema clearly allows every value."""
    return schema is True or (isinstance(schema, dict) and not set(schema) - ANNOTATIONS)


def is_nothing(schema: Any) -> bool:
    """True if the schema clearly allows no value."""
    if isinstance(schema, dict):
        return (
            ("not" in schema and is_anything(schema["not"]))
            or schema.get("enum") == []
            or any(isinstance(schema.get(word), list) and _is_never(word, schema[word]) for word in ("anyOf", "oneOf"))
            or (isinstance(schema.get("allOf"), list) and any(map(is_nothing, schema["allOf"])))
        )
    return schema is False


def _is_never(word: str, branches: list[Any]) -> bool:
    return bool(branches) and all(map(is_nothing, branches))


def drop_idle(out: Part) -> None:
    """Drops keywords that restrict nothing from one schema, not from its subschemas. In place."""
    kinds = types_of({"type": out["type"]}) if "type" in out else set(_TYPES)
    for kind, words in _TYPES.items():
        for word in () if kind in kinds else words:
            out.pop(word, None)
    for word in [word for word in _ZERO if out.get(word) == 0] + [word for word in _EMPTY if not out.get(word, True)]:
        del out[word]
    if is_anything(out.get("unevaluatedProperties")):
        del out["unevaluatedProperties"]
        out.setdefault("additionalProperties", True)
    for word in ("propertyNames", "unevaluatedItems"):
        if is_anything(out.get(word)):
            del out[word]
    if out.get("uniqueItems") is False or out.get("maxItems", 2) in (0, 1):
        out.pop("uniqueItems", None)
    if "not" in out and (is_nothing(out["not"]) or _are_apart(out, out["not"])):
        del out["not"]
    _drop_conditions(out)
    _drop_contains(out)
    _drop_dependencies(out)


def _are_apart(schema: Part, other: Any) -> bool:
    """True if types or constants show that no value fits both schemas."""
    if not isinstance(other, dict):
        return False
    values, others = values_of(schema), values_of(other)
    if values is not None and others is not None:
        return not any(type_of(value) == type_of(each) and value == each for value in values for each in others)
    kinds, other_kinds = types_of(schema), types_of(other)
    return bool(kinds and other_kinds and not kinds & other_kinds)


def _drop_conditions(out: Part) -> None:
    for word in ("then", "else"):
        if word in out and ("if" not in out or is_anything(out[word])):
            del out[word]
    if "if" in out and "then" not in out and "else" not in out:
        del out["if"]


def _drop_contains(out: Part) -> None:
    if "contains" in out and out.get("minContains") == 0 and "maxContains" not in out:
        del out["contains"]
    if "contains" not in out:
        out.pop("minContains", None)
        out.pop("maxContains", None)


def _drop_dependencies(out: Part) -> None:
    for name, each in (out.pop("dependencies", None) or {}).items():
        word = "dependentRequired" if isinstance(each, list) else "dependentSchemas"
        out[word] = {**out.get(word, {}), name: each}
    needs = {}
    for name, names in (out.get("dependentRequired") or {}).items():
        if name in out.get("required", ()):
            out["required"] = list(dict.fromkeys([*out["required"], *names]))
        elif set(names) - set(out.get("required", ())):
            needs[name] = names
    schemas = {name: each for name, each in (out.get("dependentSchemas") or {}).items() if not is_anything(each)}
    for word, left in (("dependentRequired", needs), ("dependentSchemas", schemas)):
        out.pop(word, None)
        out |= {word: left} if left else {}


def keep_fitting_values(out: Part) -> None:
    """Drops values of enum and const that other keywords exclude, and then these keywords. In place."""
    values = values_of(out)
    if values is None or {"enum", "const"} <= set(out):
        return
    left = [value for value in values if all(_fits(word, limit, value) for word, limit in out.items())]
    if len(left) < len(values):
        out.pop("const", None)
        out["enum"] = left
    for word in (*_CHECKS, "pattern"):
        out.pop(word, None)


_CHECKS = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "minLength": lambda value, limit: len(value) >= limit,
    "maxLength": lambda value, limit: len(value) <= limit,
}


def _fits(word: str, limit: Any, value: Any) -> bool:
    """True if a value satisfies one keyword, or the keyword is not checked here."""
    kind = type_of(value)
    if word == "type":
        is_whole = kind == "number" and value == int(value)
        kinds = {limit} if isinstance(limit, str) else set(limit)
        return kind in kinds or (is_whole and "integer" in kinds)
    if word == "pattern" and kind == "string":
        return finds(limit, value) is not False
    if word in _CHECKS and kind == ("string" if word.endswith("Length") else "number"):
        return bool(_CHECKS[word](value, limit))
    return True


# ----------------------------------------------------------------------------------------------------------- objects


def write_out_names(out: Part) -> None:
    """Writes the names that `propertyNames` allows, and patterns with few names, as properties. In place."""
    _write_property_names(out)
    patterns = out.get("patternProperties")
    if not isinstance(patterns, dict):
        return
    properties = dict(out.get("properties") or {})
    left = {}
    for pattern, schema in patterns.items():
        names = names_of(pattern, _MAX_NAMES)
        for name in properties if names is None else names:
            if names is not None or finds(pattern, name):
                properties[name] = both(properties.get(name, True), schema)
        if names is None:
            left[pattern] = schema
    out.pop("patternProperties")
    if properties:
        out["properties"] = properties
    if len(left) == 1 and finds_all(next(iter(left))):  # no name is left for other properties
        out["additionalProperties"] = next(iter(left.values()))
    elif left:
        out["patternProperties"] = left


def _write_property_names(out: Part) -> None:
    names = out.get("propertyNames")
    if is_nothing(names):
        names = {"enum": []}
    if not isinstance(names, dict) or "patternProperties" in out or "unevaluatedProperties" in out:
        return
    words = {word: each for word, each in names.items() if word not in ANNOTATIONS}
    if "string" not in types_of({"type": words.pop("type", "string")}):
        words = {"enum": []}
    rest, allowed = out.get("additionalProperties", True), _names_or_pattern(words)
    if not words or (rest is False and not out.get("properties")):
        del out["propertyNames"]
    elif allowed is not None:
        del out["propertyNames"]
        is_allowed = allowed.__contains__ if isinstance(allowed, list) else lambda name: finds(allowed, name)
        properties = {name: each if is_allowed(name) else False for name, each in (out.get("properties") or {}).items()}
        if isinstance(allowed, list):
            properties |= {name: rest for name in allowed if name not in properties and rest is not False}
        elif rest is not False:
            out["patternProperties"] = {allowed: rest}
        out |= {"properties": properties, "additionalProperties": False}


def _names_or_pattern(words: Part) -> list[str] | str | None:
    if set(words) in ({"enum"}, {"const"}):
        return [name for name in values_of(words) or () if isinstance(name, str)]
    if set(words) == {"pattern"} and finds(words["pattern"], "") is not None:
        return str(words["pattern"])
    if words and set(words) <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{words.get('minLength', 0)},{words.get('maxLength', '')}}}$"
    return None
