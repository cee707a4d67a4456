"""Schemas of functions that are not strict, without the keywords that XGrammar does not enforce."""

from typing import Any

import msgspec

from quire.frontend.grammar.schema import ANNOTATIONS, walk
from quire.frontend.grammar.unenforced_keywords import unfollowed


def loosened(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy without keywords that XGrammar does not enforce. Every value that fits `schema` fits the copy, too.

    A schema that is malformed or nested too deeply is returned unchanged: the compiler reports the error.
    """
    try:
        copy: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schema))
        for node in walk(copy):
            if isinstance(node, dict):
                _loosen(node)
    except (RecursionError, TypeError, KeyError, ValueError, AttributeError):
        return schema
    return copy


def _loosen(node: dict[str, Any]) -> None:
    if isinstance(node.get("oneOf"), list) and "anyOf" not in node:
        node["anyOf"] = node.pop("oneOf")
    while (word := unfollowed(node)) is not None:
        match word:
            case "enum" | "const" | "$ref" if _has_siblings(node, word):
                _keep(node, word)
            case "required":
                node["required"] = [name for name in node["required"] if name in (node.get("properties") or {})]
            case "minLength" | "maxLength":
                node.pop("minLength", None)
                node.pop("maxLength", None)
            case "patternProperties":  # the properties that it allowed become additional ones
                for name in ("patternProperties", "additionalProperties", "unevaluatedProperties"):
                    node.pop(name, None)
            case _:
                del node[word]


def _has_siblings(node: dict[str, Any], word: str) -> bool:
    return bool(set(node) - {word} - ANNOTATIONS)


def _keep(node: dict[str, Any], word: str) -> None:
    for name in set(node) - {word} - ANNOTATIONS:
        del node[name]
