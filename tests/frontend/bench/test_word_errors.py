"""The figures of transcripts: word errors and speed."""

import pytest

from quire.frontend.bench.datasets.request import BenchRequest, Sound
from quire.frontend.bench.figures import RequestTiming
from quire.frontend.bench.word_errors import num_errors, speech_figures, speech_rows, words


@pytest.mark.parametrize(
    ("said", "written", "expected"),
    [
        ("a b c", "a b c", 0),
        ("a b c", "a x c", 1),
        ("a b c", "a c", 1),
        ("a b c", "a b b c", 1),
        ("a b c", "", 3),
        ("", "a b", 2),
        ("a b c d", "b c d e", 2),
        ("Hello, World!", "hello world", 0),
    ],
)
def test_errors_are_inserted_left_out_or_changed_words(said: str, written: str, expected: int) -> None:
    assert num_errors(words(said), words(written)) == expected


def test_figures_count_answered_sounds_alone() -> None:
    sounds = [Sound("a", b"", 2.0, "one two three"), Sound("b", b"", 4.0, None), Sound("c", b"", 8.0, "never")]
    timings = [
        RequestTiming(prompt_tokens=0, text="One, two."),
        RequestTiming(prompt_tokens=0, text="whatever"),
        RequestTiming(prompt_tokens=0, error="503"),
    ]
    figures = speech_figures([BenchRequest([], 1, sound=sound) for sound in sounds], timings, 3.0)
    assert figures["rtfx"] == pytest.approx(2.0)
    assert (figures["num_reference_words"], figures["word_error_rate"]) == (3, pytest.approx(1 / 3))
    assert ("Word error rate (%)", "33.33") in speech_rows(figures)
    assert speech_figures([BenchRequest([1], 1)], [RequestTiming(prompt_tokens=1)], 1.0) == {}
    assert speech_rows({}) == []
