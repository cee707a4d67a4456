"""Sounds for Voxtral, whose processor of the library takes none in a call: it reads whole conversations instead."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import WhisperFeatureExtractor

from quire.frontend.media.errors import UnknownKeywordError
from quire.frontend.media.library_processor import Mark, read_config, ready_item
from quire.frontend.media.messages import ReadyItem

_BEGIN, _SOUND = "[BEGIN_AUDIO]", "[AUDIO]"


class VoxtralAudio:
    """Implements `AudioProcessor`: a spectrogram for each 30 s of a sound, the last one padded with silence."""

    def __init__(self, folder: str) -> None:
        config: Any = read_config(folder)
        self._extract = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        self._num_frames: int = self._extract.nb_max_frames
        audio = config.audio_config
        self._rows = audio.max_source_positions * audio.hidden_size // audio.intermediate_size
        self.rate: int = self._extract.sampling_rate
        self.max_seconds = None
        self.mark = Mark(_BEGIN + _SOUND, config.audio_token_id)

    def process(self, samples: np.ndarray, options: Mapping[str, Any]) -> ReadyItem:
        if options:
            raise UnknownKeywordError(next(iter(options)), ())
        made: Any = self._extract(
            samples,
            sampling_rate=self.rate,
            truncation=False,
            padding="longest",
            pad_to_multiple_of=self._extract.n_samples,
            return_tensors="np",
        )
        spectrogram = np.asarray(made["input_features"][0])  # [num_channels, num_frames]
        parts = spectrogram.reshape(len(spectrogram), -1, self._num_frames).transpose(1, 0, 2)
        num_rows = math.ceil(len(samples) / self._extract.n_samples) * self._rows
        return ready_item("audio", _BEGIN + _SOUND * num_rows, num_rows, {"input_features": parts})
