"""Sound files of any format as samples of one channel.

libsndfile reads WAV, FLAC, Ogg and MP3, FFmpeg (PyAV) the others. Both decode block by block, so that memory holds the
samples of one channel at the model's rate, and not the file's.
"""

import io
from collections.abc import Iterator

import numpy as np

from quire.frontend.media.errors import MediaError, MissingLibraryError

_BLOCK_FRAMES = 2**18
_RATES = range(1000, 768_001)
"""Samples a second that a file may state. Others are damaged headers."""
_UNKNOWN_SIZES = (0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000)
"""Sizes in WAV headers of programs that wrote to a pipe, and did not know the size."""
_LOUDEST = 2.0**32
"""Largest magnitude of a sample: that of any integers which were not scaled. With 10**19, features are NaN."""
_MOST_SECONDS_MISSING = 1.0
"""Seconds by which a container may overstate its length."""


class Samples:
    """Collects samples of one channel at `rate`; refuses more than `max_seconds`."""

    def __init__(self, rate: int, max_seconds: float) -> None:
        self._rate = rate
        self._max_seconds = max_seconds
        self._max_samples = int(max_seconds * rate)
        self._buffer = np.empty(min(self._max_samples, 60 * rate) + 1, np.float32)
        self._size = 0

    def add(self, samples: np.ndarray) -> None:
        """Adds [num_samples] float32. Raises MediaError past the limit."""
        size = self._size + len(samples)
        if size > self._max_samples + self._rate // 10:  # a resampler may end a little late
            raise MediaError(
                f"is longer than {self._max_seconds:g} s, the limit here (QUIRE_MAX_AUDIO_DECODE_DURATION_S); send a "
                "shorter one"
            )
        if size > len(self._buffer):
            grown = np.empty(max(size, 2 * len(self._buffer)), np.float32)
            grown[: self._size] = self._buffer[: self._size]
            self._buffer = grown
        self._buffer[self._size : size] = samples
        self._size = size

    def taken(self) -> np.ndarray:
        """All samples. Raises MediaError if there are none, or not all are numbers of a sensible size."""
        samples = self._buffer[: self._size]
        if not len(samples):
            raise MediaError("holds no sound")
        if not (samples.min() >= -_LOUDEST and samples.max() <= _LOUDEST):
            raise MediaError("holds samples that are NaN or infinite, or far beyond the range from -1 to 1")
        return samples


class Resampler:
    """Changes the rate of blocks that follow one another, by soxr's high quality."""

    def __init__(self, rate: int, wanted_rate: int) -> None:
        self._stream = None
        if rate != wanted_rate:
            try:
                import soxr
            except ImportError:
                raise MissingLibraryError("soxr") from None
            self._stream = soxr.ResampleStream(rate, wanted_rate, 1, dtype="float32", quality="HQ")

    def __call__(self, samples: np.ndarray, *, is_last: bool = False) -> np.ndarray:
        """[n] float32 to [m] float32."""
        return samples if self._stream is None else self._stream.resample_chunk(samples, last=is_last)


def read_samples(samples: np.ndarray, rate: int, wanted_rate: int, max_seconds: float) -> np.ndarray:
    """Samples [n] of one channel at `rate` as those at `wanted_rate`. Raises MediaError."""
    return _collect(iter([samples]), rate, wanted_rate, max_seconds)


def read_file(data: bytes, wanted_rate: int, max_seconds: float) -> np.ndarray:
    """The samples of a sound file, [n] float32, all channels mixed in equal parts.

    Raises:
        MediaError: it is none, damaged, cut off, empty or too long.
    """
    if not data:
        raise MediaError("is empty")
    if (found := _by_libsndfile(data, wanted_rate, max_seconds)) is not None:
        return found
    return _by_ffmpeg(data, wanted_rate, max_seconds)


def _collect(blocks: Iterator[np.ndarray], rate: int, wanted_rate: int, max_seconds: float) -> np.ndarray:
    """Mixes and resamples blocks [n] or [n, num_channels]."""
    if rate not in _RATES:
        raise MediaError(f"states {rate} samples a second; {_RATES.start} to {_RATES.stop - 1} are read")
    resample, samples = Resampler(rate, wanted_rate), Samples(wanted_rate, max_seconds)
    for block in blocks:
        mixed = block if block.ndim == 1 else block.mean(axis=1, dtype=np.float32)
        samples.add(resample(np.ascontiguousarray(mixed, np.float32)))
    samples.add(resample(np.empty(0, np.float32), is_last=True))
    return samples.taken()


# ----------------------------------------------------------------------------------------------------- libsndfile


def _by_libsndfile(data: bytes, wanted_rate: int, max_seconds: float) -> np.ndarray | None:
    """The samples; None for a file that libsndfile does not know."""
    try:
        import soundfile
    except ImportError:
        raise MissingLibraryError("soundfile") from None
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError:
        return None
    with file:
        _check_wav_size(data)
        if file.samplerate in _RATES and file.frames / file.samplerate > max_seconds + 1 and file.frames < 2**62:
            raise MediaError(
                f"is {file.frames / file.samplerate:.0f} s long, and the limit here is {max_seconds:g} s "
                "(QUIRE_MAX_AUDIO_DECODE_DURATION_S); send a shorter one"
            )
        counted = 0

        def blocks() -> Iterator[np.ndarray]:
            nonlocal counted
            while len(block := file.read(_BLOCK_FRAMES // file.channels + 1, dtype="float32", always_2d=True)):
                counted += len(block)
                yield block

        try:
            samples = _collect(blocks(), file.samplerate, wanted_rate, max_seconds)
        except soundfile.LibsndfileError as error:
            raise MediaError(f"is damaged or cut off ({_first_line(error)})") from None
        if file.format in ("FLAC", "WAV", "WAVEX", "AIFF", "W64", "RF64") and counted < file.frames:
            raise MediaError(f"is cut off: {counted} of its {file.frames} samples are there")
        return samples


def _check_wav_size(data: bytes) -> None:
    """Refuses a WAV file that ends before its samples do. libsndfile reads what is there."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    place = 12
    while place + 8 <= len(data):
        name, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        if name == b"data":
            there = len(data) - place - 8
            if size > there and size not in _UNKNOWN_SIZES:
                raise MediaError(f"is cut off: {there} of its {size} bytes of samples are there")
            return
        place += 8 + size + size % 2


# --------------------------------------------------------------------------------------------------------- FFmpeg


def _by_ffmpeg(data: bytes, wanted_rate: int, max_seconds: float) -> np.ndarray:
    try:
        import av
    except ImportError:
        raise MissingLibraryError("av") from None
    try:
        with av.open(io.BytesIO(data), mode="r", metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise MediaError("has no sound in it")
            stream = container.streams.audio[0]
            stated = _stated_seconds(stream, container)
            if stated is not None and stated > max_seconds + 1:
                raise MediaError(
                    f"is {stated:.0f} s long, and the limit here is {max_seconds:g} s "
                    "(QUIRE_MAX_AUDIO_DECODE_DURATION_S); send a shorter one"
                )
            rate = stream.rate
            samples = _collect(_frames(av, container, stream), rate, wanted_rate, max_seconds)
    except av.error.FFmpegError as error:
        raise MediaError(
            f"is no sound file that can be read, or is damaged or cut off ({_first_line(error)}); send WAV, FLAC, Ogg, "
            "MP3, MP4 or WebM"
        ) from None
    if stated is not None and len(samples) / wanted_rate < stated - _MOST_SECONDS_MISSING:
        raise MediaError(f"is cut off: {len(samples) / wanted_rate:.1f} of its {stated:.1f} seconds are there")
    return samples


def _frames(av: "object", container: "object", stream: "object") -> Iterator[np.ndarray]:
    """The decoded frames as [n, num_channels] float32."""
    planar = av.AudioResampler(format="fltp")  # type: ignore[attr-defined]
    for frame in container.decode(stream):  # type: ignore[attr-defined]
        for each in planar.resample(frame):
            yield each.to_ndarray().T
    for each in planar.resample(None):
        yield each.to_ndarray().T


def _stated_seconds(stream: "object", container: "object") -> float | None:
    """The length that the container states, if it does."""
    duration, base = stream.duration, stream.time_base  # type: ignore[attr-defined]
    if duration and base:
        return float(duration * base)
    whole: int | None = container.duration  # type: ignore[attr-defined]
    return whole / 1_000_000 if whole else None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
