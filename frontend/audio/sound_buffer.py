"""Collects samples as they come, and divides them as a whole file would be divided."""

import io
import wave

import numpy as np

from quire.frontend.media.sounds.clips import first_clip

RATE = 16_000
_WIDTH = 2


class SoundBuffer:
    """Samples of 16 bits, one channel at 16 kHz.

    Args:
        clip_seconds: the longest clip.
    """

    def __init__(self, clip_seconds: float) -> None:
        self._longest = round(clip_seconds * RATE)
        self._data = bytearray()

    @property
    def num_bytes(self) -> int:
        """Of all samples here."""
        return len(self._data)

    @property
    def is_full(self) -> bool:
        """True if there is a clip."""
        return len(self._data) > self._longest * _WIDTH

    def add(self, data: bytes) -> None:
        """Adds little-endian integers. Raises ValueError if these are no whole samples."""
        if not data or len(data) % _WIDTH:
            raise ValueError(f"{len(data)} bytes are no samples of 16 bits")
        self._data += data

    def take_clip(self) -> bytes | None:
        """The first clip, at whose end no later sample changes anything; None: more must come before."""
        if not self.is_full:
            return None
        samples = np.frombuffer(bytes(self._data[: self._longest * _WIDTH]), "<i2") / np.float32(32768)
        return self._take(first_clip(samples, RATE, self._longest) * _WIDTH)

    def take_rest(self) -> list[bytes]:
        """All that is left, in clips."""
        clips = []
        while (clip := self.take_clip()) is not None:
            clips.append(clip)
        return [*clips, self._take(len(self._data))] if self._data else clips

    def clear(self) -> int:
        """Forgets all samples; returns the number of their bytes."""
        return len(self._take(len(self._data)))

    def _take(self, num_bytes: int) -> bytes:
        taken = bytes(self._data[:num_bytes])
        del self._data[:num_bytes]
        return taken


def as_wav(samples: bytes) -> bytes:
    """Samples as a file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(_WIDTH)
        out.setframerate(RATE)
        out.writeframes(samples)
    return file.getvalue()
