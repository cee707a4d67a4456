"""The word error rate of transcripts, and how fast their sounds were heard."""

from collections.abc import Sequence
from typing import Any

from quire.frontend.bench.datasets.request import BenchRequest
from quire.frontend.bench.figures import RequestTiming


def speech_figures(
    requests: Sequence[BenchRequest], timings: Sequence[RequestTiming], duration: float
) -> dict[str, Any]:
    """Figures of the requests with a sound that were answered; empty without any.

    `rtfx` is seconds of sound heard a second, of all requests together. `word_error_rate` is the number of words
    inserted, left out or changed, divided by the number of words said (NIST SCTK's definition), over all sounds whose
    text is known. Case and punctuation do not count, as in Whisper's BasicTextNormalizer.
    """
    done = [(each.sound, timing) for each, timing in zip(requests, timings, strict=True) if not timing.error]
    heard = [(sound, timing.text) for sound, timing in done if sound is not None]
    if not heard:
        return {}
    num_seconds = sum(sound.num_seconds for sound, _ in heard)
    figures: dict[str, Any] = {"total_audio_seconds": num_seconds, "rtfx": num_seconds / duration}
    pairs = [(words(sound.text), words(text)) for sound, text in heard if sound.text is not None]
    if num_words := sum(len(said) for said, _ in pairs):
        figures["num_reference_words"] = num_words
        figures["word_error_rate"] = sum(num_errors(said, written) for said, written in pairs) / num_words
    return figures


def speech_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of `bench serve`'s table."""
    if "rtfx" not in figures:
        return []
    rows = [
        ("Seconds of sound", f"{figures['total_audio_seconds']:.2f}"),
        ("Seconds of sound per second (RTFx)", f"{figures['rtfx']:.2f}"),
    ]
    if "word_error_rate" in figures:
        rows.append(("Word error rate (%)", f"{figures['word_error_rate'] * 100:.2f}"))
    return rows


def words(text: str) -> list[str]:
    """The words of a text, without case and punctuation."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer  # a second to import

    return str(BasicTextNormalizer()(text)).split()


def num_errors(said: Sequence[str], written: Sequence[str]) -> int:
    """The fewest words to insert, leave out or change that make `written` of `said` (Levenshtein's distance)."""
    row = list(range(len(written) + 1))
    for number, word in enumerate(said, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(written, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (word != other))
    return row[-1]
