"""Repetitions at the end of an output, against the definition."""

import random

import pytest

from quire.core.errors import ParameterError
from quire.core.wire.repetition import RepetitionDetection


def repeats(token_ids: list[int], size: int, count: int) -> bool:
    pattern = token_ids[-size:]
    return len(token_ids) >= size * count and token_ids[-size * count :] == pattern * count


def test_equals_the_definition() -> None:
    random_tokens = random.Random(0)
    found = 0
    for _ in range(3000):
        token_ids = [random_tokens.randrange(2) for _ in range(random_tokens.randrange(1, 25))]
        low, count = random_tokens.randrange(4), random_tokens.randrange(2, 5)
        high = random_tokens.randrange(max(1, low), 6)
        start = random_tokens.randrange(len(token_ids))
        detection = RepetitionDetection(max_pattern_size=high, min_pattern_size=low, min_count=count)
        expected = any(repeats(token_ids[start:], size, count) for size in range(max(1, low), high + 1))
        assert detection.found_at_end(token_ids[start:]) == expected, (token_ids, start, detection)
        found += expected
    assert 300 < found < 2700


def test_nothing_is_looked_for_by_default() -> None:
    assert not RepetitionDetection().found_at_end([1] * 100)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": -1},
        {"max_pattern_size": 10_000, "min_count": 2},
        {"max_pattern_size": 1.5, "min_count": 2},
    ],
)
def test_wrong_sizes_are_refused(fields: dict) -> None:
    with pytest.raises(ParameterError) as caught:
        RepetitionDetection(**fields)
    assert caught.value.param == "repetition_detection"
