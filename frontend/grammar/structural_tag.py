"""Structural tags in XGrammar's notation: the formats within a tag, and llguidance's support for them."""

from collections.abc import Iterator
from typing import Any

_PORTABLE = {
    *("const_string", "json_schema", "any_text", "grammar", "regex", "sequence", "or", "tag", "triggered_tags"),
    *("tags_with_separator", "optional", "plus", "star", "repeat"),
}


def read_format(tag: dict[str, Any]) -> dict[str, Any]:
    """The format of a tag. The notation of before 2026, `structures` and `triggers`, is rewritten as a format.

    Raises:
        KeyError, TypeError, AttributeError: the tag is malformed.
    """
    if "structures" not in tag:
        return tag["format"]
    tags = [
        {
            "type": "tag",
            "begin": item["begin"],
            "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
            "end": item["end"],
        }
        for item in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def formats(form: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The format itself, then every format within it. A format may be changed in place while iterating."""
    yield form
    within = [*form.get("elements", ()), *form.get("tags", ()), *(rule[1] for rule in form.get("rules", ()))]
    if isinstance(form.get("content"), dict):
        within.append(form["content"])
    for each in within:
        yield from formats(each)


def is_portable(form: dict[str, Any]) -> bool:
    """True if llguidance may support a format, too."""
    return all(str(each["type"]) in _PORTABLE and each.get("style", "json") == "json" for each in formats(form))
