"""Reads sounds of prompts into what a model's tower reads, by the model's processor."""

import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quire.frontend.media.errors import MediaError
from quire.frontend.media.library_processor import Mark, check_usable, facts_of, load_processor, taken
from quire.frontend.media.messages import (
    DescribeAudio,
    DividedSound,
    DivideSound,
    ItemFacts,
    ReadAudio,
    ReadyItem,
    SoundPart,
)
from quire.frontend.media.sounds.clips import clip_starts
from quire.frontend.media.sounds.files import read_file, read_samples

_SHORTEST_SECONDS = 0.05
_TRIAL_SECONDS = 1
_OWN = {"VoxtralProcessor": "quire.frontend.media.sounds.voxtral:VoxtralAudio"}
"""Import paths by processor class, of those that take no sounds in a call."""


class AudioProcessor(Protocol):
    """Makes arrays of sounds.

    Attributes:
        rate: samples a second.
        max_seconds: of a sound, of which the library would cut the rest; None: there is no limit.
        mark: what stands for a sound.
    """

    rate: int
    max_seconds: float | None
    mark: Mark

    def process(self, samples: np.ndarray, options: Mapping[str, Any]) -> ReadyItem:
        """Makes those of one sound, [num_samples] float32. Raises UnknownKeywordError for one of `options`."""
        ...


class AudioReader:
    """Reads sounds for the model in `folder`."""

    _processor: AudioProcessor

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._facts = facts_of(self._load)

    def read(self, question: DescribeAudio | ReadAudio | DivideSound) -> ItemFacts | ReadyItem | DividedSound:
        """A sound as the tower reads it, its parts, or the facts of all. Raises MediaError."""
        if isinstance(question, DescribeAudio):
            return self._facts
        check_usable(self._facts)
        processor = self._processor
        if isinstance(question, DivideSound):
            return _divide(question, processor)
        samples = _samples(question, processor.rate)
        num_seconds = len(samples) / processor.rate
        if num_seconds < _SHORTEST_SECONDS:
            raise MediaError(f"is {num_seconds:g} s long; at least {_SHORTEST_SECONDS:g} s are needed")
        if processor.max_seconds is not None and num_seconds > processor.max_seconds:
            raise MediaError(
                f"is {num_seconds:g} s long, but the model hears {processor.max_seconds:g} s at once; send it in parts"
            )
        return taken(lambda: processor.process(samples, question.options))

    def _load(self) -> ItemFacts:
        path = _OWN.get(_processor_class(self._folder))
        self._processor = LibraryAudio(self._folder) if path is None else pkgutil.resolve_name(path)(self._folder)
        self._processor.process(np.zeros(_TRIAL_SECONDS * self._processor.rate, np.float32), {})
        return self._processor.mark.facts


class LibraryAudio:
    """Sounds in the library's processor of a checkpoint. Implements `AudioProcessor`."""

    def __init__(self, folder: str) -> None:
        self._library = load_processor(folder)
        processor = self._library.processor
        extractor = getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)
        if extractor is None:
            raise ValueError("the checkpoint's files name no processor of sounds")
        self.mark = self._library.mark("audio")
        self.rate = int(extractor.sampling_rate)
        self.max_seconds = _limit(processor, extractor, self.rate)

    def process(self, samples: np.ndarray, options: Mapping[str, Any]) -> ReadyItem:
        return self._library.process("audio", samples, self._library.choose("audio", options))


def _limit(processor: Any, extractor: Any, rate: int) -> float | None:
    """The seconds after which the library cuts a sound."""
    if isinstance(most := getattr(processor, "max_audio_len", None), int | float):
        return most
    cuts = getattr(processor, "audio_kwargs", {}).get("truncation", True)
    most = getattr(extractor, "n_samples", None)  # of a spectrogram that has one length for all sounds
    return most / rate if cuts and isinstance(most, int) else None


def _samples(question: ReadAudio, rate: int) -> np.ndarray:
    if question.rate is None:
        return read_file(question.data, rate, question.max_seconds)
    return read_samples(np.frombuffer(question.data, "<f4"), question.rate or rate, rate, question.max_seconds)


def _divide(question: DivideSound, processor: AudioProcessor) -> DividedSound:
    samples = read_file(question.data, processor.rate, question.max_seconds)
    num_seconds = len(samples) / processor.rate
    longest = min(each for each in (question.clip_seconds, processor.max_seconds, num_seconds) if each is not None)
    starts = clip_starts(samples, processor.rate, max(1, round(longest * processor.rate)))
    parts = [
        SoundPart(start / processor.rate, (end - start) / processor.rate, samples[start:end].astype("<f4").tobytes())
        for start, end in zip(starts, [*starts[1:], len(samples)], strict=True)
    ]
    return DividedSound(num_seconds, parts)


def _processor_class(folder: str) -> str:
    """The name of the processor's class in the checkpoint's files; empty if there is none."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = Path(folder) / name
        if path.is_file() and isinstance(found := json.loads(path.read_bytes()).get("processor_class"), str):
            return found
    return ""
