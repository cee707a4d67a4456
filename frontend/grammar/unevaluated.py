"""Rewrites objects with `unevaluatedProperties` and a union as a union of objects that are closed one by one."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

from quire.frontend.grammar.merging import Unmergeable, merged
from quire.frontend.grammar.schema import ANNOTATIONS

_COMBINERS = {"allOf", "anyOf", "oneOf", "if", "$ref", "dependentSchemas", "not"}
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
