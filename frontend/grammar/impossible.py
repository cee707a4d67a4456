"""Properties and branches of unions that no value fits, and unions that every value fits."""

from typing import Any

from quire.frontend.grammar.schema import ANNOTATIONS
from quire.frontend.grammar.unrestrictive_keywords import is_anything, is_nothing

Part = dict[str, Any]


def without_properties(out: Part) -> Any:
    """An object without properties that no value fits; False if one of them is required."""
    properties = out.get("properties")
    if not isinstance(properties, dict):
        return out
    never = [name for name, each in properties.items() if is_nothing(each)]
    if set(never) & set(out.get("required") or ()) and out.get("type") == "object":
        return False
    if out.get("additionalProperties") is False and not out.get("patternProperties"):
        out["properties"] = {name: each for name, each in properties.items() if name not in never}
    return out


def without_branches(out: Any) -> Any:
    """Drops branches that no value fits, and unions that every value fits."""
    for word in ("anyOf", "oneOf"):
        if not isinstance(out, dict) or not isinstance(out.get(word), list):
            continue
        branches = [branch for branch in out[word] if not is_nothing(branch)]
        if not branches:
            return False
        if word == "anyOf" and any(map(is_anything, branches)):
            del out[word]
        elif len(branches) == 1 and not set(out) - {word} - ANNOTATIONS and isinstance(branches[0], dict):
            out = {**branches[0], **{name: each for name, each in out.items() if name != word}}
        else:
            out[word] = branches
            if "type" in out and _imply(branches, out["type"]):
                del out["type"]
    return False if is_nothing(out) else out


def _imply(branches: list[Any], kinds: str | list[str]) -> bool:
    """True if the branches of a union allow no other types than these."""
    wide = {*_listed(kinds), *(("integer",) if "number" in kinds else ())}
    return all(isinstance(each, dict) and "type" in each and set(_listed(each["type"])) <= wide for each in branches)


def _listed(kinds: str | list[str]) -> list[str]:
    return [kinds] if isinstance(kinds, str) else kinds
