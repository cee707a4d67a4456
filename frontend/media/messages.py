"""The messages between the frontend and a helper process that decodes media.

A new kind of media is a question here, its answer, and a reader in `helper_process.READERS`.
"""

from msgspec import Struct


class MediaSetup(Struct, array_like=True, tag="setup"):
    """The first message: the model's folder, and the limits of one question."""

    folder: str
    limit_bytes: int  # of memory
    limit_cpu_seconds: float


class ReadSound(Struct, array_like=True, tag="sound"):
    """A sound, as a file of any format, or as samples. The answer is a `Sound`."""

    data: bytes  # a file; or float32 samples, little-endian, [num_samples]
    sample_rate: int  # of `data`, if it holds samples; 0: `data` is a file
    max_seconds: float  # longer sounds are refused
    divides: bool  # a sound that is longer than the model hears at once is divided at quiet places, and not refused


class Clip(Struct, array_like=True):
    """A part of a sound, as the model's encoder reads it."""

    start_seconds: float
    num_seconds: float
    values: bytes  # float32, little-endian
    num_channels: int


class Sound(Struct, array_like=True, tag="sound"):
    """A sound in clips that follow one another."""

    num_seconds: float
    clips: list[Clip]
    is_large: bool = False  # the helper uses much memory, and should be replaced


class MediaRefused(Struct, array_like=True, tag="refused"):
    """The data is not what it should be. `message` is a sentence's end, such as "is no sound file"."""

    message: str
    is_large: bool = False


MediaQuestion = ReadSound
MediaAnswer = Sound | MediaRefused
