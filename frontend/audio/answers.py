"""Answers of transcriptions and translations, in the form of OpenAI's API and of vLLM's additions to it."""

import math
from typing import Any

from msgspec import UNSET, Struct, UnsetType


class DurationUsage(Struct):
    """What a transcription is counted by: seconds of sound, rounded up."""

    seconds: int
    type: str = "duration"

    @classmethod
    def of(cls, num_seconds: float) -> "DurationUsage":
        return cls(math.ceil(num_seconds))


class Transcription(Struct):
    """The text alone. Translations have no usage."""

    text: str
    usage: DurationUsage | UnsetType = UNSET


class Segment(Struct):
    """A part of the text, with its times in seconds from the beginning of the sound."""

    id: int
    seek: int  # where its clip begins, in steps of 0.01 s
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None = None


class Word(Struct):
    """A word of the text, with its times in seconds from the beginning of the sound."""

    word: str
    start: float
    end: float


class VerboseTranscription(Struct):
    """The text in segments, or with its words, or both."""

    task: str
    language: str | None
    duration: float
    text: str
    segments: list[Segment] | None
    words: list[Word] | None = None
    usage: DurationUsage | UnsetType = UNSET


class TokenUsage(Struct):
    """Tokens of a stream."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class DeltaText(Struct):
    content: str


class ChunkChoice(Struct):
    delta: DeltaText
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class SpeechChunk(Struct, kw_only=True):
    """An event of a stream. It is a chunk of vLLM's and an event of OpenAI's at once: each reads its own fields.

    `type` is transcript.text.delta, and of the last event with a text transcript.text.done, which has the whole `text`.
    """

    type: str
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    usage: Any = UNSET
