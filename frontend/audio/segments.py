"""Segments of a transcript: the tokens between two timestamps."""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.frontend.audio.answers import Segment
from quire.frontend.checkpoint.speech_tokens import SpeechTokens


class ClipText(NamedTuple):
    """What the model has written of one clip.

    Attributes:
        token_ids: with timestamps, if the request wants any; without the token that ends the output.
        logprobs: of `token_ids`, and of the token that ended the output, if there is one.
        is_ended: the output ended with the token that ends outputs.
        times: when each of `token_ids` ends, in seconds from the clip's beginning; None: nobody asked.
        no_speech_prob: how likely the clip holds no speech; None: nobody asked.
    """

    start_seconds: float
    num_seconds: float
    token_ids: list[int]
    logprobs: list[float]
    text: str
    temperature: float
    is_ended: bool = False
    times: list[float] | None = None
    no_speech_prob: float | None = None


def compression_ratio(text: str) -> float:
    """How much shorter a text becomes when it is compressed: repetitions make it large."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def segments_of(
    clip: ClipText, tokens: SpeechTokens, decode: Callable[[Sequence[int]], str], first_id: int
) -> list[Segment]:
    """The segments of one clip. A part without an end lasts until the end of the clip."""
    found: list[Segment] = []
    for start, end, begin, stop in spans_of(clip, tokens):
        text_ids = [each for each in clip.token_ids[begin:stop] if tokens.seconds(each) is None]
        text = decode(text_ids)
        if not text.strip():
            continue
        logprobs = clip.logprobs[begin:stop]
        found.append(
            Segment(
                id=first_id + len(found),
                seek=round(clip.start_seconds * 100),
                start=round(clip.start_seconds + start, 3),
                end=round(clip.start_seconds + min(end, clip.num_seconds), 3),
                text=text,
                tokens=clip.token_ids[begin:stop],
                temperature=clip.temperature,
                avg_logprob=sum(logprobs) / max(1, len(logprobs)),
                compression_ratio=compression_ratio(text),
                no_speech_prob=clip.no_speech_prob,
            )
        )
    return found


def spans_of(clip: ClipText, tokens: SpeechTokens) -> list[tuple[float, float, int, int]]:
    """(start, end, first token, token behind the last) of each segment, in seconds from the clip's beginning."""
    spans: list[tuple[float, float, int, int]] = []
    start, begin, has_text = 0.0, 0, False
    for index, token_id in enumerate(clip.token_ids):
        seconds = tokens.seconds(token_id)
        if seconds is None:
            has_text = True
        elif has_text:
            spans.append((start, seconds, begin, index + 1))
            start, begin, has_text = seconds, index + 1, False
        else:
            start, begin = seconds, index
    if has_text:
        spans.append((start, clip.num_seconds, begin, len(clip.token_ids)))
    return spans
