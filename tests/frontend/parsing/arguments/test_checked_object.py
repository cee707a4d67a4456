"""Arguments of calls are JSON, whatever the model wrote."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.parsing.arguments.checked_object import CheckedObject

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(text: str, size: int = 1) -> str:
    written: list[str] = []
    checked = CheckedObject(written.append)
    for at in range(0, len(text), size):
        checked.push(text[at : at + size])
    checked.close()
    return "".join(written)


@settings(max_examples=100, deadline=None, database=None)
@given(
    value=st.dictionaries(st.text(), VALUES, max_size=4),
    indent=st.none() | st.integers(0, 3),
    ascii_only=st.booleans(),
    size=st.integers(1, 7),
)
def test_valid_json_passes_unchanged(value: Any, indent: int | None, ascii_only: bool, size: int):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert read(text, size) == text


@settings(max_examples=300, deadline=None, database=None)
@given(words=st.lists(st.sampled_from([*"{}[]:,\"\\u0aé\n\xa0 '", "true", "None", '"a"', '"b": ', "1.5"]), max_size=20))
def test_whatever_comes_what_is_written_is_an_object_or_nothing(words: list[str]):
    text = "{" + "".join(words)
    written = read(text)
    assert written == read(text, 3) == read(text, len(text))
    assert written == "" or isinstance(json.loads(written), dict), text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2, ], "b": {"c": 1 , } }', {"a": [1, 2], "b": {"c": 1}}),
        ('{"a": True, "b": None, "c": 007, "d": .5}', {"a": True, "b": None, "c": 7, "d": 0.5}),
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
        (r'{"a": "it\'s \d \u12"}', {"a": r"it's \d \u12"}),
        ('{"a": 1, oops}', {"a": 1}),
        ('{"a": 1, "b": oops, "c": 2}', {"a": 1}),
        ('{"a": {"b": [1', {"a": {"b": [1]}}),
        ('{"a": [1}', {"a": [1]}),
        ('{"a": 1 "b": 2}', {"a": 1}),
    ],
)
def test_mistakes_are_mended(text: str, value: Any):
    for size in (1, 2, len(text)):
        assert json.loads(read(text, size)) == value


@pytest.mark.parametrize("text", ["{invalid json}", "{'a': 1}", '{"a" 1}', '{"a": oops}', '{"a"', "{a: 1}", "{,}"])
def test_an_object_without_a_valid_value_is_none(text: str):
    assert read(text) == ""
