"""outlines: every text of an expression can be written, also behind a text that could end."""

import json
import random
from typing import Any

import numpy as np
import pytest

from quire.core.config.structured_outputs import StructuredOutputsOptions
from quire.core.wire.protocol import Vocabulary
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.grammar.constraint import read_constraint

pytest.importorskip("outlines_core")

WORDS = [
    b"yes",
    b" please",
    b"no",
    b".",
    b"1",
    b"23",
    b"-",
    b"e",
    b"true",
    b"{",
    b"}",
    b'"a"',
    b": ",
    b"[",
    b"]",
    b", ",
]
END = len(WORDS)
VOCABULARY = Vocabulary([*WORDS, b""], [END])


def tokens(text: str) -> list[int]:
    """Ids of the words that a text consists of, the longest first."""
    ids, rest = [], text.encode()
    while rest:
        word = max((word for word in WORDS if rest.startswith(word)), key=len)
        ids.append(WORDS.index(word))
        rest = rest[len(word) :]
    return ids


def matcher(**constraint: Any) -> Any:
    from quire.executor.sampling.grammar.outlines_matcher import OutlinesLoader
    from quire.frontend.grammar.backends.outlines_backend import OutlinesBackend

    read = read_constraint(StructuredOutputsParams(backend="outlines", **constraint), StructuredOutputsOptions())
    loader = OutlinesLoader(VOCABULARY)
    return loader.matcher(loader.load(OutlinesBackend(VOCABULARY).compile(read)))


def allowed(matcher: Any) -> set[int]:
    bitmask = np.zeros((1, 1), np.int32)
    matcher.fill(bitmask, 0)
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("constraint", "fits", "fails"),
    [
        ({"choice": ["yes", "yes please"]}, ["yes", "yes please"], ["", "yes please please"]),
        ({"regex": "[0-9]+(\\.[0-9]+)?"}, ["1", "23.1", "1231.23"], [".1", "1.", "1.1.1"]),
        ({"regex": "^yes( please)?$"}, ["yes", "yes please"], [" please"]),
        ({"regex": "yes.*"}, ["yes", "yes.", "yesyes please"], ["no"]),
        ({"json": {"type": "number"}}, ["1", "1.23", "-1.1", "1e-1", "1.1e-23"], ["1.", "-", "1e"]),
        ({"json": {"enum": [1, 1.23]}}, ["1", "1.23"], ["1.1"]),
        (
            {"json": {"type": "array", "items": {"type": "number"}, "minItems": 1}},
            ["[1]", "[1.1, 23]", "[23.23]"],
            ["[]", "[1.]"],
        ),
    ],
)
def test_a_longer_text_goes_on_where_a_shorter_one_ends(
    constraint: dict[str, Any], fits: list[str], fails: list[str]
) -> None:
    for text in [*fits, *fails]:
        made = matcher(**constraint)
        is_written = all(token_id in allowed(made) and made.accept(token_id) for token_id in [*tokens(text), END])
        assert is_written == (text in fits), text


def test_only_the_models_tokens_are_allowed() -> None:
    """Texts of an expression that matches any character, drawn at random; the mark of the end is none of them."""
    dice = random.Random(0)
    for _ in range(20):
        made, text = matcher(json={"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}), b""
        while (token_id := dice.choice(sorted(allowed(made)))) != END:
            assert made.accept(token_id)
            text += WORDS[token_id]
            if len(text) > 60:
                break
        else:
            assert isinstance(json.loads(text)["a"], (int, float))
    assert max(allowed(matcher(regex="(?s:.*)"))) == END
