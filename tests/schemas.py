"""JSON schemas for tests of constrained output: by hand, after well-known APIs, and from a seeded generator."""

import random
from typing import Any

Schema = dict[str, Any]

_WORDS = ["id", "name", "größe", "名前", "kind", "is_open", "total-cost", "ключ", "a b", "🙂", "x", "value"]
_TEXTS = ["red", "grün", "蓝", 'a"quote', "back\\slash", "new\nline", "", "🙂🙂", "tab\there", "</tag>"]
_PATTERNS = [
    "^[A-Z]{2}-[0-9]{1,4}$",
    "^(yes|no|maybe)$",
    "^[a-f0-9]{8}$",
    "^#[0-9A-F]{6}$",
    "^[à-ý]{1,4}$",
    "^v[0-9]\\.[0-9]$",
]
_FORMATS = ["date", "time", "uuid", "ipv4", "date-time"]


class SchemaMaker:
    """Makes a different schema each time, the same schemas for the same seed. All schemas have short outputs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self) -> Schema:
        """An object with nested values; one in three refers to definitions, some of which are recursive."""
        self._defs: dict[str, Schema] = {}
        self._may_define = self._random.random() < 0.34
        schema = self._object(depth=0)
        return {**schema, "$defs": self._defs} if self._defs else schema

    def _value(self, depth: int) -> Schema:
        simple = [self._enum, self._const, self._integer, self._number, self._string, self._pattern, self._plain]
        nested = [self._array, self._object, self._union, self._tuple]
        makers = simple if depth > 2 else simple + nested
        if self._may_define and depth <= 2:
            makers = [*makers, self._reference, self._recursive]
        return self._random.choice(makers)(depth)

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_WORDS, self._random.randint(1, 4 if depth == 0 else 3))
        properties = {name: self._value(depth + 1) for name in names}
        required = [name for name in names if self._random.random() < 0.7]
        schema: Schema = {"type": "object", "properties": properties, "required": required}
        if self._random.random() < 0.5:
            schema["additionalProperties"] = False
        return schema

    def _array(self, depth: int) -> Schema:
        low = self._random.randint(0, 2)
        high = low + self._random.randint(0, 2)
        return {"type": "array", "items": self._value(depth + 1), "minItems": low, "maxItems": high}

    def _tuple(self, depth: int) -> Schema:
        items = [self._value(depth + 1) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _union(self, depth: int) -> Schema:
        return {"anyOf": [self._value(depth + 1), {"type": "null"}, self._integer(depth)]}

    def _reference(self, depth: int) -> Schema:
        name = f"d{len(self._defs)}"
        self._defs[name] = {}  # taken
        self._defs[name] = self._value(max(depth, 2))
        return {"$ref": f"#/$defs/{name}"}

    def _recursive(self, depth: int) -> Schema:
        name = f"node{len(self._defs)}"
        ref = {"$ref": f"#/$defs/{name}"}
        self._defs[name] = {
            "type": "object",
            "properties": {"v": self._integer(depth), "next": {"anyOf": [{"type": "null"}, ref]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
        return ref

    def _enum(self, depth: int) -> Schema:
        return {"enum": self._random.sample([*_TEXTS, 1, -2.5, None, True], self._random.randint(1, 5))}

    def _const(self, depth: int) -> Schema:
        return {"const": self._random.choice([*_TEXTS, 7, False, {"k": ["é"]}])}

    def _integer(self, depth: int) -> Schema:
        low = self._random.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 5000)}

    def _number(self, depth: int) -> Schema:
        return {"type": "number", "minimum": -1.5, "maximum": 99.5}

    def _string(self, depth: int) -> Schema:
        low = self._random.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 6)}

    def _pattern(self, depth: int) -> Schema:
        if self._random.random() < 0.3:
            return {"type": "string", "format": self._random.choice(_FORMATS)}
        return {"type": "string", "pattern": self._random.choice(_PATTERNS)}

    def _plain(self, depth: int) -> Schema:
        return {"type": self._random.choice(["boolean", "null", ["boolean", "null"]])}


def _closed_by(name: str, value: str) -> Schema:
    return {"type": "object", "properties": {name: {"const": value}}, "required": [name]}


class KeywordMixer:
    """Makes schemas of random keywords: up to four that fit a type, and some that do not. Many schemas make no sense.

    A library must enforce the schemas that it accepts, so tests validate outputs and do not count acceptances.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, depth: int = 0) -> Schema:
        """One schema, sometimes with a nested one."""
        dice = self._random
        kind = dice.choice(list(_KEYWORDS))
        schema: Schema = {"type": kind} if dice.random() < 0.85 else {}
        if dice.random() < 0.08:
            schema["type"] = [kind, "null"]
        schema |= dice.sample(_KEYWORDS[kind], dice.randint(1, 4))
        for others in (_COMBINERS, _REMARKS):
            if dice.random() < 0.2:
                schema |= [dice.choice(others)]
        if depth < 2 and dice.random() < 0.35:
            inner = self.make(depth + 1)
            lists = {"type": "array", "items": inner, "maxItems": 2}
            objects = {"type": "object", "properties": {"p": inner}, "required": ["p"]}
            schema = dice.choice([lists, objects, {"anyOf": [inner, {"type": "null"}]}])
        if depth == 0 and "#/$defs/q" in str(schema):
            schema["$defs"] = {"q": {"type": "integer", "maximum": 7}}
        if depth == 0 and "#/$defs/o" in str(schema):
            schema["$defs"] = {**schema.get("$defs", {}), "o": {"type": "object", "properties": {"a": _A, "c": _A}}}
        return schema


_A = {"type": "integer"}
_REMARKS = [("title", "t"), ("default", 1), ("deprecated", True), ("x-own", 3), ("nullable", True)]
_COMBINERS: list[tuple[str, Any]] = [
    ("anyOf", [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 5}]),
    ("anyOf", [{"minimum": 5}, {"required": ["a"]}]),
    ("oneOf", [{"type": "string"}, {"type": "integer"}]),
    ("oneOf", [_closed_by("k", "a"), _closed_by("k", "b")]),
    ("oneOf", [{"type": "integer"}, {"type": "number"}]),
    ("allOf", [{"type": "integer"}, {"minimum": 3}]),
    ("allOf", [{"maxLength": 2}]),
    ("allOf", [{"properties": {"a": _A}}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]),
    ("allOf", [{"$ref": "#/$defs/o"}, {"properties": {"b": {"type": "null"}}}]),
    ("allOf", [{"$ref": "#/$defs/o"}, {"additionalProperties": {"maximum": 9}}]),
    ("allOf", [{"items": {"maximum": 9}, "maxItems": 2}, {"prefixItems": [{"type": "integer"}], "minItems": 1}]),
    ("anyOf", [{"type": "object", "required": ["a"]}, {"not": {}}]),
    ("anyOf", [{"properties": {"a": _A}, "required": ["a"]}, {"properties": {"z": _A}, "required": ["z"]}]),
    ("anyOf", [{"$ref": "#/$defs/o"}, {"properties": {"z": _A}}]),
    *(("$ref", "#/$defs/q"), ("$ref", "#/$defs/o"), ("if", {"const": 1}), ("if", True), ("then", {"minimum": 4})),
    *(("not", {"type": "null"}), ("not", False), ("unevaluatedProperties", False)),
]
_KEYWORDS: dict[str, list[tuple[str, Any]]] = {
    "string": [
        *(("minLength", 2), ("maxLength", 3), ("pattern", "^[ab]{1,4}$"), ("pattern", "b"), ("pattern", "^a")),
        *(
            ("pattern", "a$|^b"),
            ("pattern", "^[^a]b?$"),
            ("pattern", "^\\d{2}$"),
            ("pattern", "^a\\nb?$"),
            ("pattern", '["\\\\]a|^b'),
            ("format", "uuid"),
            ("format", "binary"),
        ),
        *(("enum", ["a", "bb", "ccc"]), ("const", "bb"), ("contentEncoding", "base64"), ("not", {"const": "a"})),
    ],
    "integer": [
        *(("minimum", 3), ("minimum", 3.5), ("minimum", -5), ("maximum", 12), ("maximum", -2), ("multipleOf", 3)),
        *(("exclusiveMinimum", 3), ("exclusiveMinimum", -1.5), ("exclusiveMaximum", 12), ("format", "int32")),
        *(("enum", [1, 6, 7, "x"]), ("const", 6), ("not", {"const": 4})),
    ],
    "number": [
        *(("minimum", -1.5), ("minimum", 1000), ("maximum", 12), ("exclusiveMinimum", 0), ("exclusiveMaximum", 2.5)),
        *(("multipleOf", 0.5), ("multipleOf", 2), ("enum", [1, 2.5, None]), ("const", 2.0)),
    ],
    "array": [
        *(
            ("items", _A),
            ("items", {"type": "string", "maxLength": 2}),
            ("items", False),
        ),
        *(("prefixItems", [{"type": "boolean"}, {"type": "null"}]), ("additionalItems", False), ("minItems", 1)),
        *(("minItems", 3), ("maxItems", 2), ("uniqueItems", True), ("uniqueItems", False), ("contains", {"const": 1})),
        *(("minContains", 2), ("unevaluatedItems", False), ("enum", [[1], [1, 2]])),
    ],
    "object": [
        *(("properties", {"a": _A, "b": {"type": "boolean"}}), ("required", ["a"]), ("required", ["a", "c"])),
        *(("properties", {"a": {"type": "string", "pattern": "^x+$", "maxLength": 2}}), ("enum", [{"a": 1}])),
        *(("additionalProperties", False), ("additionalProperties", {"type": "null"}), ("additionalProperties", True)),
        *(
            ("patternProperties", {"^x": {"type": "boolean"}}),
            ("patternProperties", {"^[ab]$": {"type": "integer"}, "^\\t": {"type": "null"}}),
            ("propertyNames", {"maxLength": 2}),
            ("propertyNames", {"type": "string"}),
            ("propertyNames", {"pattern": "^[ab]"}),
            ("propertyNames", {"enum": ["a", "c"]}),
            ("patternProperties", {"a": {"maximum": 5}}),
            ("minProperties", 1),
        ),
        *(("maxProperties", 2), ("unevaluatedProperties", False), ("dependentRequired", {"a": ["b"]})),
        *(("dependentSchemas", {"a": {"required": ["b"]}}), ("dependencies", {"a": ["b"]})),
    ],
}


def _closed(properties: dict[str, Schema], required: list[str] | None = None) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


_ID = {"type": "string", "pattern": "^[a-z]{2,4}_[A-Za-z0-9]{6}$"}
_MONEY = _closed(
    {"currency": {"enum": ["USD", "EUR", "JPY"]}, "amount": {"type": "integer", "minimum": 0, "maximum": 999999}}
)

API_SCHEMAS: dict[str, Schema] = {
    "weather tool": _closed(
        {"city": {"type": "string", "minLength": 1, "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}}
    ),
    "payment intent": _closed(
        {"id": _ID, "price": _MONEY, "captured": {"type": "boolean"}, "receipt": {"anyOf": [_ID, {"type": "null"}]}}
    ),
    "calendar event": _closed(
        {
            "summary": {"type": "string", "maxLength": 10},
            "start": {"type": "string", "format": "date-time"},
            "attendees": {
                "type": "array",
                "maxItems": 2,
                "items": _closed({"email": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.com$"}}),
            },
        }
    ),
    "pull request": {
        "type": "object",
        "properties": {
            "number": {"type": "integer", "minimum": 1, "maximum": 99999},
            "state": {"enum": ["open", "closed"]},
            "labels": {"type": "array", "items": {"enum": ["bug", "good first issue"]}, "maxItems": 3},
            "head": {"$ref": "#/$defs/branch"},
            "base": {"$ref": "#/$defs/branch"},
        },
        "required": ["number", "state", "head", "base"],
        "$defs": {
            "branch": _closed(
                {
                    "ref": {"type": "string", "pattern": "^[a-z/-]{1,12}$"},
                    "sha": {"type": "string", "pattern": "^[0-9a-f]{12}$"},
                }
            )
        },
    },
    "geometry": {
        "oneOf": [
            _closed({"type": {"const": "Point"}, "coordinates": {"$ref": "#/$defs/position"}}),
            _closed(
                {
                    "type": {"const": "LineString"},
                    "coordinates": {
                        "type": "array",
                        "items": {"$ref": "#/$defs/position"},
                        "minItems": 2,
                        "maxItems": 3,
                    },
                }
            ),
        ],
        "$defs": {
            "position": {
                "type": "array",
                "items": {"type": "number", "minimum": -180, "maximum": 180},
                "minItems": 2,
                "maxItems": 2,
            }
        },
    },
    "chat blocks": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "anyOf": [
                _closed({"type": {"const": "divider"}}),
                _closed(
                    {
                        "type": {"const": "section"},
                        "text": _closed(
                            {"type": {"enum": ["mrkdwn", "plain_text"]}, "text": {"type": "string", "maxLength": 9}}
                        ),
                    }
                ),
            ]
        },
    },
    "folder tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"enum": ["src", "docs", "данные"]},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                },
                "required": ["name", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "person, as pydantic writes it": {
        "$defs": {"Role": {"enum": ["admin", "user"], "title": "Role", "type": "string"}},
        "title": "Person",
        "type": "object",
        "properties": {
            "name": {"title": "Name", "type": "string", "maxLength": 8},
            "age": {
                "anyOf": [{"type": "integer", "minimum": 0, "maximum": 150}, {"type": "null"}],
                "default": None,
                "title": "Age",
            },
            "role": {"$ref": "#/$defs/Role"},
        },
        "required": ["name", "role"],
    },
    "kubernetes labels": {
        "type": "object",
        "properties": {
            "apiVersion": {"const": "v1"},
            "kind": {"enum": ["Pod", "Service"]},
            "replicas": {"type": "integer", "multipleOf": 2, "minimum": 2, "maximum": 20},
        },
        "required": ["apiVersion", "kind"],
        "patternProperties": {"^x-[a-z]{1,3}$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "error, in two parts": {
        "allOf": [
            {
                "type": "object",
                "properties": {"code": {"type": "integer", "minimum": 400, "maximum": 599}},
                "required": ["code"],
            },
            {"type": "object", "properties": {"message": {"type": "string", "maxLength": 6}}, "required": ["message"]},
        ]
    },
}
