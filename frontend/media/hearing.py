"""Reads sounds for a model that hears: what its encoder reads of each, clip by clip."""

import hashlib
from typing import Any, NamedTuple

from quire.core import envs
from quire.core.config.resolved import EncoderSpec
from quire.core.errors import ParameterError
from quire.core.wire.encoder_input import Features
from quire.core.wire.media import Modality
from quire.frontend.media.decoder import MediaDecoder
from quire.frontend.media.messages import Clip, ReadSound, Sound
from quire.frontend.media.samples import read_samples_of

_SECONDS_A_ROW = 0.02
"""Of the encoder's rows: two frames of 160 samples at 16 kHz each, in all models with features."""


class HeardClip(NamedTuple):
    """A part of a sound, as the engine takes it."""

    start_seconds: float
    num_seconds: float
    features: Features


class HeardSound(NamedTuple):
    """A sound in clips that follow one another."""

    num_seconds: float
    clips: list[HeardClip]

    @property
    def num_bytes(self) -> int:
        """The memory of its features."""
        return sum(len(clip.features.values) for clip in self.clips)


class Hearing:
    """Reads files and samples.

    Args:
        decoder: decodes them, in another process.
        encoder: what the model's encoder reads.
    """

    modality: Modality = "audio"

    def __init__(self, decoder: MediaDecoder, encoder: EncoderSpec) -> None:
        self._decoder = decoder
        self._encoder = encoder

    async def features_of(self, value: Any, param: str) -> Features:
        """The features of a sound that a program gives. Errors are those of `read_value`."""
        return (await self.read_value(value, param)).clips[0].features

    @property
    def clip_seconds(self) -> float:
        """Seconds of sound that the model hears at once."""
        return self._encoder.max_rows * _SECONDS_A_ROW

    async def read_file(self, data: bytes, param: str, *, divides: bool) -> HeardSound:
        """Reads a sound file.

        Args:
            divides: divide a sound that is longer than the model hears at once; False refuses it.

        Raises:
            ParameterError: it is none, damaged or too long; `param` names the field.
            UnavailableError: the host is too busy.
        """
        return await self._read(data, 0, param, divides=divides)

    async def read_value(self, value: Any, param: str) -> HeardSound:
        """Reads a sound that a program gives: (samples, samples a second), or the bytes of a file.

        Raises:
            ParameterError: the value has another form; and as for `read_file`.
        """
        if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], (int, float)):
            [value] = value
        if isinstance(value, bytes):
            return await self.read_file(value, param, divides=False)
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise ParameterError(
                f"{param} must be one pair of samples and samples a second, such as (array, 16000), or the bytes of a "
                "file.",
                param=param,
            )
        samples = read_samples_of(value, param)
        if not samples.rate:
            raise ParameterError(f"{param}: the samples need their rate, such as (array, 16000).", param=param)
        return await self._read(samples.data, samples.rate, param, divides=False)

    def close(self) -> None:
        """Ends the processes that decode."""
        self._decoder.close()

    async def _read(self, data: bytes, rate: int, param: str, *, divides: bool) -> HeardSound:
        question = ReadSound(data, rate, envs.read_float("MAX_AUDIO_DECODE_DURATION_S"), divides)
        sound = await self._decoder.ask(question, Sound, num_bytes=len(data), param=param)
        clips = [HeardClip(clip.start_seconds, clip.num_seconds, self._features(clip)) for clip in sound.clips]
        return HeardSound(sound.num_seconds, clips)

    def _features(self, clip: Clip) -> Features:
        num_rows, num_channels = self._encoder.max_rows, self._encoder.num_channels
        if clip.num_channels != num_channels or len(clip.values) != 4 * num_channels * 2 * num_rows:
            raise ParameterError(
                f"The checkpoint's feature extractor makes {clip.num_channels} channels of "
                f"{len(clip.values) // 4 // clip.num_channels} frames, but its encoder reads {num_channels} of "
                f"{2 * num_rows}; correct preprocessor_config.json.",
                param="model",
            )
        digest = hashlib.sha256(b"%d:" % num_channels + clip.values).digest()
        return Features(clip.values, num_channels, num_rows, digest)
