"""Videos as frames: files of several forms, and what is wrong with others."""

import base64
import io
import struct
import tempfile
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from quire.core.errors import ParameterError
from quire.frontend.media.errors import MediaError
from quire.frontend.media.frames import frames_of, is_video
from quire.frontend.media.messages import Frames, Sampling
from quire.frontend.media.videos.decoding import read_frames, read_video, sample
from tests.image_checkpoints import encode_video, make_frames

FRAMES = make_frames(40, 64, 48)
ALL = Sampling(num_frames=-1)


@pytest.mark.parametrize(
    ("total", "fps", "sampling", "expected"),
    [
        (5, 10.0, Sampling(), [0, 1, 2, 3, 4]),
        (100, 10.0, Sampling(num_frames=4), [0, 33, 66, 99]),
        (100, 10.0, Sampling(num_frames=-1, fps=0.5), [0, 24, 49, 74, 99]),
        (100, 10.0, Sampling(num_frames=3, fps=0.5), [0, 49, 99]),
        (5, 10.0, Sampling(fps=1.0), [0]),
        (3, 0.0, Sampling(fps=1.0), [0, 1, 2]),
    ],
)
def test_frames_are_taken_at_even_distances(total: int, fps: float, sampling: Sampling, expected: list[int]) -> None:
    assert sample(total, fps, sampling) == expected


@pytest.mark.parametrize(
    ("form", "codec", "options"),
    [
        ("mp4", "mpeg4", {"g": "5"}),
        ("mp4", "mpeg4", {"g": "12", "bf": "2"}),
        ("matroska", "mpeg4", {"g": "10"}),
        ("avi", "mjpeg", {}),
        ("mpegts", "mpeg2video", {}),
    ],
)
def test_the_frames_of_a_file_are_those_that_were_written(form: str, codec: str, options: dict[str, str]) -> None:
    """Those that are sought by key frames are the same as those of the whole video."""
    data = encode_video(FRAMES, form, codec, rate=25, **options)
    whole = read_video(data, ALL, 0)
    assert (whole.total, len(whole.frames)) == (40, 40)
    assert whole.fps == pytest.approx(25)
    assert np.abs(whole.frames.astype(int) - FRAMES).mean() < 15
    few = read_video(data, Sampling(num_frames=4), 0)
    assert list(few.indices) == [0, 13, 26, 39]
    np.testing.assert_array_equal(few.frames, whole.frames[few.indices])


def edited(data: bytes, start: float, seconds: float) -> bytes:
    """An MP4 file whose edit list shows only a part of its frames."""
    scales = [int.from_bytes(data[at : at + 4], "big") for at in (data.index(b"mvhd") + 16, data.index(b"mdhd") + 16)]
    at = data.index(b"elst") + 12  # of the one entry: its length, in units of the file, and its start, in the track's
    entry = struct.pack(">Ii", round(seconds * scales[0]), round(start * scales[1]))
    return data[:at] + entry + data[at + len(entry) :]


@pytest.mark.parametrize(("start", "count"), [(0, 10), (14, 8), (5, 12), (3, 30)])
def test_an_edit_list_leaves_frames_out_and_the_file_is_whole(start: int, count: int) -> None:
    whole = encode_video(FRAMES, rate=8, g="12")
    shown = read_video(whole, ALL, 0).frames[start : start + count]
    data = edited(whole, start / 8, count / 8)
    video = read_video(data, ALL, 0)
    assert video.total == count
    np.testing.assert_array_equal(video.frames, shown)
    few = read_video(data, Sampling(num_frames=4), 0)
    np.testing.assert_array_equal(few.frames, shown[few.indices])


def test_a_video_that_lies_on_its_side_is_turned() -> None:
    data = encode_video(FRAMES[:3])
    turned = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(turned, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    box = bytearray(turned.getvalue())
    matrix = (0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000)  # a quarter, clockwise
    place = box.index(b"tkhd") + 4 + 40
    box[place : place + 36] = b"".join(each.to_bytes(4, "big", signed=True) for each in matrix)
    upright, found = read_video(data, ALL, 0), read_video(bytes(box), ALL, 0)
    np.testing.assert_array_equal(found.frames, np.rot90(upright.frames, k=-1, axes=(1, 2)))


def sound_file() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def frameless() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        container.start_encoding()
    return buffer.getvalue()


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"


def early_index() -> bytes:
    """An MP4 whose index is before its frames, so that a part of it can be read."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        with av.open(file.name, "w", options={"movflags": "faststart"}) as container:
            stream = container.add_stream("mjpeg", rate=8)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
            for frame in FRAMES:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))
        return Path(file.name).read_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"no video at all", "is no video that can be read"),
        (PLAYLIST, "is no video that can be read"),
        (sound_file(), "has no video in it"),
        (frameless(), "is no video that can be read"),
        (encode_video(FRAMES)[:2000], "has no video in it"),
        (encode_video(FRAMES, "matroska", "mjpeg")[:-20000], "cut off"),
        (early_index()[:-20000], "cut off"),
        (edited(early_index(), 0, 4)[:-20000], "cut off"),
    ],
    ids=["empty", "text", "playlist", "sound", "frameless", "headless", "truncated-mkv", "truncated-mp4", "edited-mp4"],
)
def test_what_is_no_whole_video_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        read_video(data, ALL, 0)


def test_frames_that_are_too_large_are_refused() -> None:
    data = encode_video(FRAMES[:2])
    with pytest.raises(MediaError, match="64 x 48 pixels, and 3000 are read"):
        read_video(data, ALL, 3000)


def jpeg(frame: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG")
    return base64.b64encode(buffer.getvalue())


def test_a_list_of_images_is_a_video() -> None:
    video = read_frames(b",".join(map(jpeg, FRAMES[:3])), Frames(), Sampling(fps=2.0), 0)
    assert video.frames.shape == (3, 48, 64, 3)
    assert (video.total, video.fps, list(video.indices)) == (3, 2.0, [0, 1, 2])
    with pytest.raises(MediaError, match="frame, number 1, that is no image"):
        read_frames(jpeg(FRAMES[0]) + b"," + base64.b64encode(b"none"), Frames(), ALL, 0)
    with pytest.raises(MediaError, match="different sizes"):
        read_frames(jpeg(FRAMES[0]) + b"," + jpeg(FRAMES[0, :8]), Frames(), ALL, 0)


def test_frames_of_programs_are_read_in_all_their_forms() -> None:
    metadata = {"total_num_frames": 40, "fps": 8.0, "frames_indices": [0, 2, 4], "do_sample_frames": False}
    images = [Image.fromarray(frame) for frame in FRAMES[:3]]
    for value in (FRAMES[:3], images, list(FRAMES[:3])):
        assert is_video(value)
        assert frames_of(value, "v")[0] == FRAMES[:3].tobytes()
        form = frames_of((value, metadata), "v")[3]
        assert form == Frames((3, 48, 64), 8.0, [0, 2, 4], 40)
    assert not is_video([FRAMES[:3], FRAMES[:3]])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (FRAMES[0, 0], "must be frames"),
        (FRAMES[:2].astype(np.float32), "must be frames"),
        (FRAMES[:0], "must be frames"),
        ((FRAMES[:2], {"speed": 2}), "'speed'"),
        ((FRAMES[:2], {"fps": 0}), "fps must be"),
        ((FRAMES[:2], {"frames_indices": [1]}), "1 numbers for 2 frames"),
        ((FRAMES[:2], {"do_sample_frames": True}), "do_sample_frames"),
    ],
)
def test_frames_of_another_form_are_refused(value: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        frames_of(value, "multi_modal_data.video[0]")
