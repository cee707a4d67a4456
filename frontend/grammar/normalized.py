"""Rewrites schemas for grammar libraries, so that a library must follow each keyword that remains.

If possible, `allOf`, and `$ref` with other keywords, become one schema, so that it may be closed as a whole. The target
of a `$ref` is copied to `$defs` of the root: once unchanged, and once open if it is part of an object elsewhere.
"""

import re
from typing import Any

from quire.frontend.grammar.impossible import without_branches, without_properties
from quire.frontend.grammar.merging import Unmergeable, merged
from quire.frontend.grammar.pattern_notations import finds
from quire.frontend.grammar.schema import (
    ANNOTATIONS,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    SCHEMAS,
    SchemaError,
    check_refs,
    exclude_each_other,
    resolve,
)
from quire.frontend.grammar.unevaluated import close, spread
from quire.frontend.grammar.unrestrictive_keywords import (
    drop_idle,
    is_anything,
    is_nothing,
    keep_fitting_values,
    write_out_names,
)

_COMBINERS = ("allOf", "anyOf", "oneOf", "if", "$ref", "dependentSchemas")
_PLACES = ("$defs", "definitions", "$anchor", "$dynamicAnchor")
"""Keywords that only hold the targets of references."""

_MAX_MERGES = 1000

Part = dict[str, Any]


def normalize(schema: Any, *, closed: bool) -> Any:
    """An equivalent schema with fewer keywords.

    Args:
        closed: objects with `properties` or `patternProperties` allow no other properties, unless the schema says so.

    Raises:
        SchemaError: a `$ref` leaves the schema or refers to itself, a tuple is written in two ways, or no value fits.
    """
    check_refs(schema)
    try:
        out = _Normalizer(schema, closed, max_merges=_MAX_MERGES).normalize()
    except (_TooMany, RecursionError):  # a part of the schema refers to itself
        out = _Normalizer(schema, closed, max_merges=0).normalize()
    if out is False:
        raise SchemaError("it comes to the schema false, which allows no value")
    return out


def simplified(schema: Part) -> Part:
    """An equivalent schema in which objects are merged with their parts; a malformed schema unchanged.

    Each `$ref` then leads to `#` or to a definition of the root.
    """
    try:
        out = normalize(schema, closed=False)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):  # the compiler reports it
        return schema
    return out if isinstance(out, dict) else schema


class _TooMany(Exception):
    """More schemas would have to be merged than is reasonable."""


class _Normalizer:
    """Rewrites one schema.

    Args:
        max_merges: 0 leaves all schemas with parts unmerged.
    """

    def __init__(self, root: Any, closed: bool, *, max_merges: int) -> None:
        self._root, self._closed, self._max_merges = root, closed, max_merges
        self._num_merges = 0
        self._alive: list[Any] = []  # because targets are known by id
        self._names = {(id(root), closed): ""}  # of targets, by id and `closed`
        self._targets: list[tuple[str, Any, bool]] = []
        self._within: list[tuple[int, bool]] = []

    def normalize(self) -> Any:
        """The whole schema."""
        out = self._node(self._root, self._closed)
        definitions = {}
        while self._targets:
            name, target, closed = self._targets.pop()
            definitions[name] = self._node(target, closed)
        return {**out, "$defs": definitions} if isinstance(out, dict) and definitions else out

    def _node(self, node: Any, closed: bool) -> Any:
        if not isinstance(node, dict):
            return node
        place = (id(node), closed)
        if place in self._within:
            return self._reference("", node, closed)
        self._within.append(place)
        try:
            return self._rewritten(self._flat(node), closed)
        finally:
            self._within.pop()

    def _rewritten(self, out: Any, closed: bool) -> Any:
        """A flat schema with its subschemas normalized."""
        if not isinstance(out, dict):
            return out
        if is_nothing(out):
            return False
        out = dict(out)
        drop_idle(out)
        out = spread(out, self._flat_part, lambda branches: exclude_each_other(branches, self._root))
        self._alive.append(out)
        close(out)
        write_out_names(out)
        if "$ref" in out:
            target = resolve(out["$ref"], self._root)
            out |= self._reference(out["$ref"], target, closed and _is_reference(out))
        if closed and _may_close(out):
            out["additionalProperties"] = False
        if isinstance(out.get("oneOf"), list) and "anyOf" not in out:
            branches = [self._judged(branch) for branch in out["oneOf"] if not is_nothing(branch)]
            if exclude_each_other(branches, self._root):
                out["anyOf"] = out.pop("oneOf")
        self._normalize_children(out, closed)
        keep_fitting_values(out)
        return without_branches(without_properties(out))

    def _normalize_children(self, out: Part, closed: bool) -> None:
        # If several subschemas describe parts of one object, none may be closed, or it would exclude the other parts.
        alone = closed and not any(word in out for word in ("properties", "patternProperties"))
        for word in SCHEMA_MAPS:
            if isinstance(out.get(word), dict):
                deep = closed and word != "dependentSchemas"
                out[word] = {name: self._node(child, deep) for name, child in out[word].items()}
        for word in SCHEMA_LISTS:
            if isinstance(out.get(word), list):
                others = {"allOf", "anyOf", "oneOf"} & set(out) - {word}
                deep = closed if word == "prefixItems" else alone and word != "allOf" and not others
                out[word] = [self._node(child, deep) for child in out[word]]
        for word in SCHEMAS:
            if isinstance(out.get(word), (dict, bool)):
                deep = closed and word not in ("not", "if", "then", "else")
                out[word] = self._node(out[word], deep)

    def _reference(self, ref: str, target: Any, closed: bool) -> Part:
        """A reference to the copy of a target in the root's `$defs`."""
        place = (id(target), closed)
        if place not in self._names:
            self._alive.append(target)
            base = re.sub(r"\W+", "_", ref.rpartition("/")[2]) or "part"
            taken, number = {*self._names.values()}, 1
            name = base
            while name in taken:
                number += 1
                name = f"{base}_{number}"
            self._names[place] = name
            self._targets.append((name, target, closed))
        name = self._names[place]
        return {"$ref": f"#/$defs/{name}" if name else "#"}

    # -------------------------------------------------------------------------------------------------- merging

    def _flat(self, node: Any) -> Any:
        """A schema merged with its `allOf` and `$ref`, if they can be one; else unchanged."""
        if not isinstance(node, dict):
            return node
        rest = {word: each for word, each in node.items() if word not in _PLACES}
        _unify_tuples(rest)
        parts = _parts(rest)
        is_decided = is_anything(rest.get("if")) or is_nothing(rest.get("if"))
        done = ("allOf", "$ref", *(("if", "then", "else") if is_decided else ()))
        own = {word: each for word, each in rest.items() if word not in done}
        if not parts or (len(parts) == 1 and _is_reference(parts[0]) and not set(own) - ANNOTATIONS):
            return {**own, **(parts[0] if parts else {})}
        if not self._max_merges:
            return rest
        whole = {word: own.pop(word) for word in ("unevaluatedProperties", "unevaluatedItems") if word in own}
        try:
            out: Any = True
            for part in [*parts, own]:  # the base's properties come first
                out = merged(out, self._closed_part(self._flat_part(part)) if part is not own else own)
                self._num_merges += 1
                if self._num_merges > self._max_merges:
                    raise _TooMany
        except Unmergeable:
            return rest
        self._alive.append(out)
        remarks = {word: each for word, each in own.items() if word in ANNOTATIONS}
        return {**out, **whole, **remarks} if isinstance(out, dict) else out

    def _judged(self, branch: Any) -> Any:
        """A branch merged with its parts, as are its required properties, if possible. Only for comparing branches."""
        try:
            flat = self._flat_part(branch)
            properties = flat.get("properties") if isinstance(flat, dict) else None
            if not isinstance(properties, dict):
                return flat
            names = [name for name in flat.get("required", ()) if name in properties]
            return {**flat, "properties": {**properties, **{name: self._flat_part(properties[name]) for name in names}}}
        except Unmergeable:
            return branch

    def _flat_part(self, part: Any) -> Any:
        part = self._flat(part)
        for _ in range(_MAX_MERGES):
            if not isinstance(part, dict) or "$ref" not in part:
                return part
            if not _is_reference(part):
                raise Unmergeable
            remarks = {word: each for word, each in part.items() if word in ANNOTATIONS}
            target = self._flat(resolve(part["$ref"], self._root))
            part = {**target, **remarks} if isinstance(target, dict) else target
        raise SchemaError("$ref leads through too many others")

    @staticmethod
    def _closed_part(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            raise Unmergeable
        part = dict(part)
        close(part)
        if "unevaluatedProperties" in part or "unevaluatedItems" in part:
            raise Unmergeable
        return part


def _is_reference(schema: Any) -> bool:
    """True if a schema is a reference and nothing else."""
    return isinstance(schema, dict) and set(schema) - ANNOTATIONS == {"$ref"}


def _parts(schema: Part) -> list[Any]:
    """The schemas that a value must also fit: from `$ref`, `allOf`, and a decided `if`."""
    parts = [{"$ref": schema["$ref"]}] if "$ref" in schema else []
    if isinstance(schema.get("allOf"), list):
        parts += [each for each in schema["allOf"] if not is_anything(each)]
    for word, applies in (("then", is_anything(schema.get("if"))), ("else", is_nothing(schema.get("if")))):
        if applies and word in schema:
            parts.append(schema[word])
    return parts


def _unify_tuples(schema: Part) -> None:
    """Rewrites a tuple of a draft before 2020-12, a list under `items`. Only then does `additionalItems` matter."""
    rest = schema.pop("additionalItems", None)
    if isinstance(schema.get("items"), list):
        if "prefixItems" in schema:
            raise SchemaError("items is a list beside prefixItems; it must be one schema there")
        schema["prefixItems"] = schema.pop("items")
        if rest is not None:
            schema["items"] = rest


def _may_close(schema: Part) -> bool:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties") or {}
    if not isinstance(properties, dict) or any(word in schema for word in ("additionalProperties", *_COMBINERS)):
        return False
    others = set(schema.get("required") or ()) - set(properties)
    return ("properties" in schema or bool(patterns)) and all(
        any(finds(pattern, name) for pattern in patterns) for name in others
    )
