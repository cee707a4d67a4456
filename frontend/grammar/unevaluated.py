"""Rewrites objects with `unevaluatedProperties` and a union as a union of objects that are closed one by one."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

from quire.frontend.grammar.merging import Unmergeable, merged
from quire.frontend.grammar.schema import ANNOTATIONS

_APPLICATORS = ("allOf", "anyOf", "oneOf", "if", "dependentSchemas")
_COMBINERS = {*_APPLICATORS, "$ref", "not"}
_MAX_BRANCHES = 4
"""Most branches that may hold together: each set of them becomes a separate object."""

Part = dict[str, Any]


def spread(schema: Part, flat: Callable[[Any], Any], exclude_each_other: Callable[[list[Any]], bool]) -> Part:
    """An equivalent schema without `unevaluatedProperties`; the same schema where there is none.

    Properties count as evaluated if a branch that holds names them. So each set of branches that may hold together is
    merged with the rest of the schema, and closed.

    Args:
        flat: merges a branch with its parts. Raises Unmergeable.
        exclude_each_other: returns True if no value fits two branches.
    """
    union = {"anyOf", "oneOf"} & set(schema)
    if "unevaluatedProperties" not in schema or "unevaluatedItems" in schema or len(union) != 1:
        return schema
    [word] = union
    base = {name: each for name, each in schema.items() if name not in (word, "unevaluatedProperties", *ANNOTATIONS)}
    if _COMBINERS & set(base) or not isinstance(schema[word], list):
        return schema
    try:
        branches = [flat(each) for each in schema[word]]
        apart = exclude_each_other([merged(base, each) for each in branches])
        if not apart and (word == "oneOf" or len(branches) > _MAX_BRANCHES):
            return schema
        sets = [each for size in range(1, 2 if apart else len(branches) + 1) for each in combinations(branches, size)]
        objects = [_closed(base, together, schema["unevaluatedProperties"]) for together in sets]
    except Unmergeable:
        return schema
    remarks = {name: each for name, each in schema.items() if name in ANNOTATIONS}
    return {**remarks, "anyOf": objects}


def _closed(base: Part, branches: tuple[Any, ...], rest: Any) -> Any:
    """The objects that fit all of the branches; `rest` is the schema of properties that none of them names."""
    out: Any = base
    for branch in branches:
        if isinstance(branch, dict) and {*_COMBINERS, "unevaluatedProperties"} & set(branch):
            raise Unmergeable
        out = merged(out, branch)
    if isinstance(out, dict):
        if "allOf" in out:
            raise Unmergeable
        out.setdefault("additionalProperties", rest)
    return out


def close(out: Part) -> None:
    """Writes `unevaluatedProperties` and `unevaluatedItems` as keywords of one schema, if it has no parts. In place."""
    if any(_describes_parts(out.get(word)) for word in _APPLICATORS) or "$ref" in out:
        return
    for word, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if word in out and not (word == "unevaluatedItems" and "contains" in out):
            out.setdefault(plain, out.pop(word))
            out.pop(word, None)


def _describes_parts(branches: Any) -> bool:
    """True if subschemas may name properties or items, which would then count as evaluated."""
    if branches is None:
        return False
    return not isinstance(branches, list) or not all(
        isinstance(branch, dict) and not set(branch) - ANNOTATIONS - {"required", "type", "minProperties"}
        for branch in branches
    )
