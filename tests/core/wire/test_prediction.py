"""A prediction is followed along outputs that differ from it: what comes next, and how much was right."""

import pytest

from quire.core.wire.prediction import Prediction, PredictionWalk

TEXT = list(range(10, 40))


@pytest.mark.parametrize(
    ("output", "following", "num_right"),
    [
        ([], TEXT, 0),
        (TEXT[:5], TEXT[5:], 5),
        (TEXT, [], 30),
        ([*TEXT, 7], [], 30),
        ([*TEXT[:5], 99], [], 5),  # differs: nobody knows where it goes on
        ([*TEXT[:5], 99, TEXT[6]], TEXT[7:], 5),  # one token replaced
        ([*TEXT[:5], 98, 99, *TEXT[5:8]], TEXT[8:], 8),  # two put in
        ([*TEXT[:5], TEXT[8]], TEXT[9:], 5),  # three left out
        ([*TEXT[:5], *TEXT[25:28]], TEXT[28:], 6),  # many left out
        ([*TEXT[:20], *TEXT[:3]], [], 20),  # it never goes back
        ([1, 2, 3, 4], [], 0),
    ],
)
def test_what_comes_next_and_what_was_right(output: list[int], following: list[int], num_right: int) -> None:
    for size in (1, 2, len(output) or 1):  # however the output arrives
        walk = PredictionWalk(Prediction(TEXT))
        for start in range(0, len(output), size):
            walk.push(output[start : start + size])
        assert walk.next(100) == following
        assert (walk.num_right, walk.num_wrong) == (num_right, len(TEXT) - num_right)


def test_a_short_prediction() -> None:
    walk = PredictionWalk(Prediction([5]))
    assert walk.next(4) == [5]
    walk.push([6])
    assert (walk.next(4), walk.num_right, walk.num_wrong) == ([], 0, 1)


def test_a_run_is_found_between_tokens_that_look_like_it() -> None:
    """Packed, the tokens 0 and 256 have the bytes of one token 1 shifted."""
    walk = PredictionWalk(Prediction([256, 256, 256, 0, 1, 1, 1, 7]))
    walk.push([5, 1, 1, 1])
    assert walk.next(2) == [7]


def test_walks_share_their_prediction() -> None:
    prediction = Prediction(TEXT)
    one, other = PredictionWalk(prediction), PredictionWalk(prediction)
    one.push(TEXT[:9])
    assert (one.next(1), other.next(1)) == ([TEXT[9]], [TEXT[0]])
