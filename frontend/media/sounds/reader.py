"""Reads sounds into the features of a model's encoder, by the feature extractor of Transformers."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from quire.frontend.media.errors import MediaError
from quire.frontend.media.messages import Clip, ReadSound, Sound
from quire.frontend.media.sounds.clips import clip_starts
from quire.frontend.media.sounds.files import read_file, read_samples

_SHORTEST_SECONDS = 0.025
"""One window of the spectrogram."""


class SoundReader:
    """Reads sounds for the model in `folder`."""

    def __init__(self, folder: str) -> None:
        self._extract = _load_extractor(Path(folder))
        self._rate: int = self._extract.sampling_rate
        self._longest: int = self._extract.n_samples

    def read(self, question: ReadSound) -> Sound:
        """A sound in clips of features. Raises MediaError."""
        if question.sample_rate:
            given = np.frombuffer(question.data, "<f4")
            samples = read_samples(given, question.sample_rate, self._rate, question.max_seconds)
        else:
            samples = read_file(question.data, self._rate, question.max_seconds)
        num_seconds = len(samples) / self._rate
        if num_seconds < _SHORTEST_SECONDS:
            raise MediaError(f"is {num_seconds:g} s long; at least {_SHORTEST_SECONDS:g} s are needed")
        if len(samples) > self._longest and not question.divides:
            raise MediaError(
                f"is {num_seconds:g} s long, but the model hears {self._longest / self._rate:g} s of a prompt; cut it, "
                "or send it to /v1/audio/transcriptions, which divides it"
            )
        starts = clip_starts(samples, self._rate, self._longest)
        ends = [*starts[1:], len(samples)]
        return Sound(num_seconds, [self._clip(samples, *each) for each in zip(starts, ends, strict=True)])

    def _clip(self, samples: np.ndarray, start: int, end: int) -> Clip:
        found = self._extract(samples[start:end], sampling_rate=self._rate, return_tensors="np")
        features = np.ascontiguousarray(found["input_features"][0], "<f4")
        return Clip(start / self._rate, (end - start) / self._rate, features.tobytes(), features.shape[0])


def _load_extractor(folder: Path) -> Any:
    """Transformers' feature extractor of a checkpoint, or the one of its class if the folder has no settings of it."""
    os.environ["OMP_NUM_THREADS"] = "1"  # others need the cores; torch reads it when it is imported
    from transformers import WhisperFeatureExtractor

    if any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return WhisperFeatureExtractor.from_pretrained(str(folder))
    config = json.loads((folder / "config.json").read_text())
    return WhisperFeatureExtractor(feature_size=config.get("num_mel_bins", 80))
