"""Patterns of strings and names: found as `jsonschema` finds them, in JSON as RFC 8259 writes it, by every library."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.core.wire.structured_outputs import GrammarBackend
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.pattern_notations import finds, whole_regex
from quire.frontend.grammar.pattern_reader import PatternError
from quire.frontend.grammar.pattern_tree import texts_of
from quire.frontend.grammar.patterns import read_pattern
from tests.frontend.grammar.libraries import Grammar

pytest.importorskip("outlines_core")
pytest.importorskip("lmformatenforcer")

THREE: tuple[GrammarBackend, ...] = ("xgrammar", "guidance", "outlines")
TEXTS = [
    *(
        "",
        "a",
        "b",
        "ab",
        "abc",
        "cab",
        "ac",
        "cb",
        "a\nb",
        "a\n",
        "\n",
        "\t",
        "\r",
        "\f",
        "\v",
        "\0",
        "\x01",
        " ",
        "!",
    ),
    *(
        '"',
        "\\",
        'a"b',
        "a\\b",
        "/",
        "é",
        "名",
        "🙂",
        "a-b",
        "0",
        "12",
        "{",
        "a{",
        "]",
        "^",
        "x_a",
        "[",
        "&",
        "#~",
    ),
]
PATTERNS = [
    *("^a\\nb$", "^a\nb$", "^\\t$", "^\\r$", "^\\f$", "^\\v$", "^\\0$", "^\t$", "^[\x00-\x1f]$", "^[\\u0000-\\u001f]$"),
    *('"', "^\\\\$", '^["\\\\]$', "^a[\\s\\S]b$", "^\\x22$", "^\\u005c$", "^[^a]$", "^[^\\n]{2}$"),
    *("b", "^b", "b$", "^a|b$", "^(a|b)$", "^(?:a|)b", "(^|c)a", "a(b|$)", "^$", "", "a*", "^^a$$"),
    *("^[a-]+b$", "^[-/#&~]+$", "^\\/$", "^[a-z_-]+$", "^a{1,2}b{0}$", "^{$", "^a{$", "^]$", "^[\\]^]$", "^[&[]$"),
    *("^(?P<first>a)b$", "^é$", "^[à-ÿ]$", "^🙂$", "^\\d+$", "^\\s$", "^(a|b){2,3}?$", "^x_", "^\\S$", "^[\\b]$"),
]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("backend", THREE)
def test_a_pattern_is_found_as_the_validator_finds_it(backend: GrammarBackend) -> None:
    for pattern in PATTERNS:
        schema = {"type": "string", "pattern": pattern}
        validator, grammar = Draft202012Validator(schema), Grammar(backend, json=schema)
        for text in TEXTS:
            if text.endswith("\n") and "$" in pattern:
                continue  # Python's $ also holds before the last line feed; ECMA's does not
            assert grammar.accepts(json.dumps(text, ensure_ascii=False)) == validator.is_valid(text), (pattern, text)
            if not is_json(f'"{text}"'):
                assert not grammar.accepts(f'"{text}"'), (pattern, text)


def test_lm_format_enforcer_takes_patterns_without_escapes_alone() -> None:
    taken = []
    for pattern in PATTERNS:
        schema = {"type": "string", "pattern": pattern}
        try:
            grammar = Grammar("lm-format-enforcer", json=schema)
        except GrammarError:
            continue
        taken.append(pattern)
        for text in TEXTS:
            if text.endswith("\n") and "$" in pattern:
                continue
            accepted = grammar.accepts(json.dumps(text, ensure_ascii=False))
            assert accepted == Draft202012Validator(schema).is_valid(text), (pattern, text)
    assert len(taken) >= 12


@pytest.mark.parametrize(
    ("pattern", "fits", "fails"),
    [
        ("^\\cJ$", ["\n"], ["J", "cJ"]),
        ("^\\u{1F642}$", ["🙂"], ["u"]),
        ("^\\uD83D\\uDE42$", ["🙂"], []),
        ("^a$", ["a"], ["a\n"]),
        ("^.$", ["a", "\t", "\x85"], ["\n", "\r", "\u2028"]),
        ("^[^]$", ["a", "\n"], ["aa"]),
        ("^[[:a]$", ["[", ":"], ["b"]),
        ("^[a&&b]$", ["a", "&", "b"], ["&&"]),
        ("^\\<a\\>$", ["<a>"], ["a"]),
        ("^\\d$", ["7"], ["٣"]),
        ("^\\W$", ["é", "-"], ["a", "_"]),
        ("^\\s$", ["\ufeff", "\u3000"], ["\x1c"]),
    ],
)
@pytest.mark.parametrize("backend", THREE)
def test_patterns_are_ecmas(backend: GrammarBackend, pattern: str, fits: list[str], fails: list[str]) -> None:
    """Values by ECMA 262, where Python or the libraries read a pattern in another way."""
    grammar = Grammar(backend, json={"type": "string", "pattern": pattern})
    assert [text for text in fits if not grammar.accepts(json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in fails if grammar.accepts(json.dumps(text, ensure_ascii=False))] == []


@pytest.mark.parametrize(
    ("name", "takers"),
    [(name, ["guidance"]) for name in ("^x_", "b", "^a|c$", "^\\t")]
    + [(name, ["xgrammar", "guidance"]) for name in ("^a\\nb$", '^["\\\\]$', "^x_[ab]*$")],
)
def test_names_follow_patterns_as_strings_do(name: str, takers: list[GrammarBackend]) -> None:
    """XGrammar takes few names, or names without escapes."""
    schema = {"type": "object", "patternProperties": {name: {"type": "integer"}}, "additionalProperties": False}
    for backend in takers:
        grammar = Grammar(backend, json=schema)
        for text in TEXTS:
            accepted = grammar.accepts(json.dumps({text: 1}, ensure_ascii=False))
            assert accepted == Draft202012Validator(schema).is_valid({text: 1}), text
            assert not grammar.accepts(json.dumps({text: "x"}, ensure_ascii=False))
    if "xgrammar" not in takers:
        with pytest.raises(GrammarError, match="patternProperties"):
            Grammar("xgrammar", json=schema)


def test_xgrammar_takes_one_pattern_of_names() -> None:
    schema = {"type": "object", "patternProperties": {"^x_[a-c]+$": {"type": "integer"}}, "additionalProperties": False}
    grammar = Grammar("xgrammar", json=schema)
    assert [name for name in ("x_a", "x_", "ax_a", "x_d") if grammar.accepts(json.dumps({name: 1}))] == ["x_a"]
    for more in ({"patternProperties": {"^x": {}, "x$": {}}}, {"additionalProperties": True}):
        with pytest.raises(GrammarError, match="patternProperties"):
            Grammar("xgrammar", json={**schema, **more})


@pytest.mark.parametrize("kinds", ["string", ["string", "null"], ["string", "integer"]])
@pytest.mark.parametrize("backend", THREE)
def test_a_pattern_is_of_strings_alone(backend: GrammarBackend, kinds: Any) -> None:
    schema = {"type": kinds, "pattern": '"b'}
    grammar = Grammar(backend, json=schema)
    for value in ('a"bc', "b", None, 1, True):
        assert grammar.accepts(json.dumps(value)) == Draft202012Validator(schema).is_valid(value), value


FOUR: tuple[GrammarBackend, ...] = (*THREE, "lm-format-enforcer")


@pytest.mark.parametrize("limits", [{"minLength": 1, "maxLength": 3}, {"minLength": 2}, {"maxLength": 1}], ids=str)
@pytest.mark.parametrize("backend", FOUR)
def test_a_string_of_a_length_may_hold_any_character(backend: GrammarBackend, limits: dict[str, int]) -> None:
    """Each in one of its forms: as it is, or escaped."""
    schema = {"type": "string", **limits}
    validator, grammar = Draft202012Validator(schema), Grammar(backend, json=schema)
    for text in [*TEXTS, '""', '\\"\n', "\x7f", "\x9f\0", "🙂🙂🙂", "🙂🙂🙂🙂"]:
        if backend == "lm-format-enforcer" and any(character > "\uffff" for character in text):
            continue  # it takes the two halves of such a character's escape for two characters
        forms = {json.dumps(text), json.dumps(text, ensure_ascii=False)}
        assert any(map(grammar.accepts, forms)) == validator.is_valid(text), text
        if not is_json(f'"{text}"'):
            assert not grammar.accepts(f'"{text}"'), text


def test_a_string_of_a_length_is_utf8() -> None:
    """XGrammar's `Regex` allowed longer encodings, for each byte of which a reader gets U+FFFD."""
    grammar = Grammar("xgrammar", json={"type": "string", "minLength": 1, "maxLength": 5})
    for encoded in (b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x80\x80\x80", b"\xed\xa0\x80"):
        assert not grammar.accepts(b'"' + encoded + b'"'), encoded
    for text in "\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff":
        assert grammar.accepts(f'"{text}"'), text


@pytest.mark.parametrize("any_whitespace", [True, False])
def test_within_tags_a_string_of_a_length_may_hold_any_character(any_whitespace: bool) -> None:
    part = {"type": "string", "minLength": 2, "maxLength": 3}
    schema = {"type": "object", "properties": {"a": part, "l": {"type": "array", "items": part}}}
    schema["required"] = ["a", "l"]
    form = {"type": "json_schema", "json_schema": schema}
    options = {"disable_any_whitespace": not any_whitespace}
    grammar = Grammar("xgrammar", structural_tag={"format": form}, **options)
    for text in ("ab", '"\n', "\\é🙂", "\x00\x1f/", "a", '"', "abcd"):
        value = json.dumps({"a": text, "l": [text]}, ensure_ascii=False)
        assert grammar.accepts(value) == (2 <= len(text) <= 3), text
    tags = Grammar("xgrammar", structural_tag={"format": {**form, "style": "qwen_xml"}})
    for text, is_right in (("ab", True), ('"\n<', True), ("abcd", False)):
        written = f'<parameter=a>{text}</parameter>\n<parameter=l>["\\"\\n"]</parameter>'
        assert tags.accepts(written) == is_right, text
    assert not tags.accepts('<parameter=a>ab</parameter>\n<parameter=l>["\n\n"]</parameter>')


FORMATS = {
    "date-time": ("2024-01-01T00:00:00Z", "2023-01-01T00:00:00Z"),
    "time": ("20:24:00Z", "10:00:00Z"),
    "date": ("2024-01-01", "2023-01-01"),
    "duration": ("P2024D", "P1D"),
    "email": ("a2024@b.com", "a@b.com"),
    "ipv4": ("20.24.1.1", "1.1.1.1"),
    "ipv6": ("2024::1", "::1"),
    "uuid": ("20240000-0000-4000-8000-000000000000", "10000000-0000-4000-8000-000000000000"),
}
"""By format, two texts: one with the year in it."""


@pytest.mark.parametrize("form", FORMATS)
def test_a_pattern_beside_a_format_holds_with_it(form: str) -> None:
    """In one schema, in parts, and with a length; only llguidance holds to both."""
    both = {"type": "string", "format": form, "pattern": "20[:.]?24"}
    parts = {"allOf": [{"type": "string", "format": form}, {"type": "string", "pattern": both["pattern"]}]}
    right, wrong = FORMATS[form]
    for schema in (both, parts, {**both, "maxLength": len(right)}):
        grammar = Grammar("guidance", json=schema)
        accepted = [grammar.accepts(json.dumps(text)) for text in (right, wrong, "2024", "a20.24")]
        assert accepted == [True, False, False, False]
    for backend in ("xgrammar", "outlines", "lm-format-enforcer"):
        with pytest.raises(GrammarError, match="pattern beside format"):
            Grammar(backend, json=both)


def test_within_tags_json_is_escaped_and_text_is_not() -> None:
    part = {"type": "string", "pattern": '^["\\n]b$'}
    schema = {
        "type": "object",
        "properties": {"a": part, "l": {"type": "array", "items": part}},
        "required": ["a", "l"],
    }
    form = {"type": "json_schema", "json_schema": schema}
    assert Grammar("xgrammar", structural_tag={"format": form}).accepts('{"a": "\\nb", "l": ["\\"b"]}')
    tags = Grammar("xgrammar", structural_tag={"format": {**form, "style": "qwen_xml"}})
    for text, is_right in (("\nb", True), ("\\nb", False), ('"b', True)):
        assert tags.accepts(f'<parameter=a>{text}</parameter>\n<parameter=l>["\\nb"]</parameter>') == is_right, text
    assert not tags.accepts('<parameter=a>"b</parameter>\n<parameter=l>["\nb"]</parameter>')


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        *(
            ("(?=a)b", "looks around"),
            ("(?i)a", "flags"),
            ("(a)\\1", "\\1"),
            ("\\bb", "\\b"),
            ("a^b", "cannot be followed"),
        ),
        *(
            ("(a", "unmatched ("),
            ("a)", "unmatched )"),
            ("*a", "nothing before"),
            ("a++", "repetition of"),
            ("[]", "class"),
        ),
        *(
            ("a{3,2}", "out of order"),
            ("a{,3}", "lower limit"),
            ("\\x1", "hexadecimal"),
            ("[b-a]", "range"),
            ("[a", "end"),
        ),
        ("a" * 20_000, "more than 16384"),
        *(("(" * 70 + ")" * 70, "groups within"), ("(^|)" * 70, "too many places"), ("a{9999999}", "too high")),
    ],
)
def test_what_is_no_pattern_is_told(pattern: str, what: str) -> None:
    with pytest.raises(PatternError) as caught:
        read_pattern(pattern)
    assert what in str(caught.value)


def test_a_library_may_know_more_than_we_read() -> None:
    assert whole_regex("^\\p{Lu}$") is None
    assert Grammar("guidance", json={"type": "string", "pattern": "^\\p{Lu}$"}).accepts('"É"')


def test_no_pattern_takes_long_to_find() -> None:
    assert finds("^(a+)+$", "a" * 200)
    assert not finds("^(a+)+$", "a" * 200 + "!")
    assert finds("^((a*){100000}){100000}$", "aa")
    assert not finds("^((a?){3,90000}b){90000}$", "aab")
    assert finds("^(ab?){2,3}$", "aba")
    assert not finds("^(ab?){2,3}$", "a")


def test_the_texts_of_a_pattern_are_counted_to_a_limit() -> None:
    assert texts_of(read_pattern("^(a|b)c?$"), 4) == ["a", "ac", "b", "bc"]
    assert texts_of(read_pattern("^(a|b)c?$"), 3) is None
    assert texts_of(read_pattern("^a"), 10**6) is None
    assert texts_of(read_pattern("^(a|b){0,90000}$"), 10) is None
