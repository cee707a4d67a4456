"""Decodes videos: frames at even distances, as vLLM takes them, turned as the file says, in RGB.

FFmpeg (PyAV) decodes. Only frames that are taken are kept, and a frame far from the one before is sought by the key
frame ahead of it.
"""

import base64
import binascii
import bisect
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.frontend.media.errors import MediaError, MissingLibraryError
from quire.frontend.media.images.decoding import read_image
from quire.frontend.media.messages import Frames, Sampling

try:
    import av
except ImportError:
    raise MissingLibraryError("av") from None

MAX_BYTES = 3 * 2**29
"""Of the frames that are taken of one video, in RGB."""
FORMATS = "asf,avi,flv,gif,h264,hevc,ivf,matroska,mov,mpeg,mpegts,mpegvideo,nut,ogg,rm,webm"
"""Those of FFmpeg that hold a video in the file itself. Playlists name other files, which it would open."""
_SEEKABLE = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""Formats with an index of their frames."""
_MOST_SECONDS_MISSING = 1.0
"""Seconds by which a file may overstate its length."""
_LOOKS_LIKE = 'send MP4, WebM, Matroska, AVI or MPEG, or frames as "data:video/jpeg;base64,...,..."'


class Video(NamedTuple):
    """Frames of a video.

    Attributes:
        frames: [num_frames, height, width, 3] uint8, RGB.
        total: frames that the video has.
        fps: frames a second of the video; None: unknown.
        indices: of the frames among those of the video.
    """

    frames: np.ndarray
    total: int
    fps: float | None
    indices: Sequence[int]


def sample(total: int, fps: float, sampling: Sampling) -> list[int]:
    """The frames of `total` that are taken, as vLLM's default loader does: at most `num_frames`, and at most `fps` a
    second, at even distances from the first to the last, and one at least."""
    count = total if sampling.num_frames <= 0 else min(sampling.num_frames, total)
    if sampling.fps > 0 and fps > 0:
        count = min(count, math.floor(total / fps * sampling.fps))
    count = max(1, count)
    return list(range(total)) if count == total else np.linspace(0, total - 1, count, dtype=int).tolist()


def read_video(data: bytes, sampling: Sampling, max_pixels: int) -> Video:
    """Reads a video file.

    Args:
        max_pixels: videos with more in a frame are refused; 0: no limit.

    Raises:
        MediaError: it is none, has no frames, is damaged or cut off, or too large.
    """
    if not data:
        raise MediaError("is empty")
    try:
        with _opened(data) as container:
            index = _index(data, container, _stream(container))
        with _opened(data) as container:
            return _read(container, _stream(container), index, sampling, max_pixels)
    except av.error.FFmpegError as error:
        raise MediaError(
            f"is no video that can be read, or is damaged or cut off ({_first_line(error)}); {_LOOKS_LIKE}"
        ) from None


def read_frames(data: bytes, frames: Frames, sampling: Sampling, max_pixels: int) -> Video:
    """Reads a video that is given in frames: all of them are taken. Raises MediaError."""
    if frames.shape is None:
        rows = [_frame(part, number, max_pixels) for number, part in enumerate(data.split(b","))]
        if len({row.shape for row in rows}) > 1:
            raise MediaError("has frames of different sizes")
        images = np.stack(rows)
        return Video(images, len(images), sampling.fps if sampling.fps > 0 else 1.0, range(len(images)))
    count, height, width = frames.shape
    _check_size(count, width, height, max_pixels)
    images = np.frombuffer(data, np.uint8).reshape(count, height, width, 3)
    indices = range(count) if frames.indices is None else frames.indices
    return Video(images, count if frames.total is None else frames.total, frames.fps, indices)


class _Index(NamedTuple):
    """The frames of a file: the times of all in the order of their show, in units of the stream, and the numbers of key
    frames; no times where frames cannot be sought by them."""

    total: int
    times: Sequence[int]
    keys: Sequence[int]


def _opened(data: bytes, **more: str) -> Any:
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "", **more}
    return av.open(io.BytesIO(data), mode="r", metadata_errors="ignore", container_options=options)


def _stream(container: Any) -> Any:
    if not container.streams.video:
        raise MediaError("has no video in it")
    return container.streams.video[0]


def _read(container: Any, stream: Any, index: _Index, sampling: Sampling, max_pixels: int) -> Video:
    stream.thread_type = "AUTO"
    fps = float(stream.average_rate or stream.guessed_rate or 0)
    indices = sample(index.total, fps, sampling)
    _check_size(len(indices), stream.width, stream.height, max_pixels)
    frames = [_rgb(frame) for frame in _frames(container, stream, index, indices)]
    if len(frames) < len(indices):
        raise MediaError(f"is damaged or cut off: {len(frames)} of {len(indices)} frames could be decoded")
    if len({frame.shape for frame in frames}) > 1:
        raise MediaError("changes its size between frames")
    return Video(np.stack(frames), index.total, fps or None, indices)


def _index(data: bytes, container: Any, stream: Any) -> _Index:
    """Reads the file through without decoding it. Raises MediaError if it has fewer frames than it says, or none."""
    packets, end = [], 0.0  # of all streams, in seconds
    for packet in container.demux():
        if packet.pts is not None and packet.time_base is not None:
            end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream is stream and packet.size:
            packets.append(packet)
    if not packets:
        raise MediaError("is a video without frames")
    if len(packets) < stream.frames and (there := _count_all(data)) < stream.frames:
        raise MediaError(f"is cut off: {there} of its {stream.frames} frames are there")
    stated = (container.duration or 0) / av.time_base
    if end < stated - _MOST_SECONDS_MISSING:
        raise MediaError(f"is cut off: {end:.1f} of its {stated:.1f} seconds are there")
    shown = [packet for packet in packets if not packet.is_discard]
    times = sorted(packet.pts for packet in shown if packet.pts is not None)
    if len(set(times)) < len(shown) or container.format.name not in _SEEKABLE:
        return _Index(len(shown), [], [])
    keys = [bisect.bisect_left(times, packet.pts) for packet in shown if packet.is_keyframe]
    return _Index(len(shown), times, sorted(keys))


def _count_all(data: bytes) -> int:
    """The frames of a file, with those that the edit list of an MP4 leaves out, as editors and phones write it."""
    with _opened(data, ignore_editlist="1") as container:
        return sum(1 for packet in container.demux(_stream(container)) if packet.size)


def _frames(container: Any, stream: Any, index: _Index, indices: Sequence[int]) -> Iterator[Any]:
    """Yields the frames at `indices`, ascending, as far as they can be decoded. It seeks where a key frame lies between
    the next one and what follows the last one."""
    decoding: Iterator[Any] = container.decode(stream)
    if not index.times:
        wanted = set(indices)
        yield from itertools.islice((frame for number, frame in enumerate(decoding) if number in wanted), len(indices))
        return
    upcoming = 0
    for number in indices:
        place = bisect.bisect_right(index.keys, number)
        if place and upcoming < index.keys[place - 1]:
            container.seek(index.times[index.keys[place - 1]], stream=stream, backward=True)
            decoding = container.decode(stream)
        found = next((frame for frame in decoding if frame.pts == index.times[number]), None)
        if found is None:
            return
        upcoming = number + 1
        yield found


def _rgb(frame: Any) -> np.ndarray:
    """[height, width, 3] uint8, turned as the file says."""
    return np.rot90(frame.to_ndarray(format="rgb24"), k=round(frame.rotation / 90) % 4)


def _frame(part: bytes, number: int, max_pixels: int) -> np.ndarray:
    """A frame that is an image in base64."""
    try:
        image = read_image(base64.b64decode(part, validate=True), None, max_pixels)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"has a frame, number {number}, that is no valid base64 ({error})") from None
    except MediaError as error:
        raise MediaError(f"has a frame, number {number}, that {error}") from None
    return np.asarray(image)


def _check_size(count: int, width: int, height: int, max_pixels: int) -> None:
    if max_pixels and width * height > max_pixels:
        raise MediaError(
            f"has frames of {width} x {height} pixels, and {max_pixels} are read (QUIRE_MAX_IMAGE_PIXELS); send it "
            "smaller"
        )
    if count * width * height * 3 > MAX_BYTES:
        raise MediaError(
            f"has {count} frames of {width} x {height} pixels, over {MAX_BYTES} bytes; send fewer or smaller ones, or "
            "lower num_frames (--media-io-kwargs)"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
