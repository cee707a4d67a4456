"""Sound files become the samples and features that Transformers would get, or a refusal."""

import asyncio
import io
import os
import signal
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import pytest
import soundfile
import soxr

from quire.core.config.resolved import EncoderSpec
from quire.core.errors import ParameterError
from quire.frontend.media.decoder import MediaDecoder
from quire.frontend.media.errors import MediaError
from quire.frontend.media.hearing import Hearing
from quire.frontend.media.messages import ReadSound, Sound
from quire.frontend.media.sounds.clips import clip_starts
from quire.frontend.media.sounds.files import read_file
from quire.frontend.media.sounds.reader import SoundReader
from tests.tiny_whisper import NUM_ROWS, RATE, as_read, extractor, features_of, sound, wav


def written(samples: np.ndarray, form: str, rate: int = RATE, **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, **options)
    return file.getvalue()


def muxed(samples: np.ndarray, form: str, codec: str, rate: int = 48_000) -> bytes:
    """A container of FFmpeg's with one channel."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.rate = rate
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            out.mux(packet)
    return file.getvalue()


def likeness(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest correlation of two sounds, of which one may begin a little later."""
    size = min(len(found), len(expected)) - 4000
    middle = expected[2000 : 2000 + size]
    best = 0.0
    for shift in range(0, 4000, 4):
        part = found[shift : shift + size]
        if len(part) == size:
            best = max(best, float(part @ middle / np.sqrt((part @ part) * (middle @ middle))))
    return best


def test_samples_of_a_wav_file_are_its_own() -> None:
    samples = sound()
    np.testing.assert_array_equal(read_file(wav(samples), RATE, 10), as_read(samples))


def test_channels_are_mixed_and_rates_changed() -> None:
    left, right = sound(0, rate=44_100), sound(1, rate=44_100)
    found = read_file(written(np.stack((left, right), 1), "WAV", 44_100, subtype="FLOAT"), RATE, 10)
    expected = soxr.resample(((left + right) / 2).astype(np.float32), 44_100, RATE, quality="HQ")
    assert abs(len(found) - len(expected)) <= 1
    size = min(len(found), len(expected))
    np.testing.assert_allclose(found[:size], expected[:size], atol=1e-5)


@pytest.mark.parametrize(
    ("form", "options", "least"),
    [("FLAC", {}, 0.9999), ("OGG", {"subtype": "VORBIS"}, 0.97), ("OGG", {"subtype": "OPUS"}, 0.95), ("MP3", {}, 0.95),
     ("AIFF", {}, 0.9999)],
    ids=str,
)  # fmt: skip
def test_formats_of_libsndfile(form: str, options: dict[str, Any], least: float) -> None:
    samples = sound(seconds=1.5)
    assert likeness(read_file(written(samples, form, **options), RATE, 10), samples) > least


@pytest.mark.parametrize(("form", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("matroska", "flac")])
def test_formats_of_ffmpeg(form: str, codec: str) -> None:
    samples = sound(seconds=1.5, rate=48_000)
    fine = {"flac": "s16"}.get(codec)
    if fine:
        pytest.skip("the encoder takes no floats")
    found = read_file(muxed(samples, form, codec), RATE, 10)
    assert likeness(found, sound(seconds=1.5)) > 0.9


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def test_a_file_that_is_cut_off_or_none_is_refused() -> None:
    samples = sound(seconds=2)
    whole = wav(samples)
    bad = {
        "is empty": b"",
        "no sound file": b"this is a text, and no sound" * 50,
        "is cut off": cut(whole),
        "holds no sound": wav(samples[:0]),
    }
    for reason, data in bad.items():
        with pytest.raises(MediaError, match=reason):
            read_file(data, RATE, 10)
    for data in (cut(written(samples, "FLAC")), cut(muxed(samples, "mp4", "aac"))):
        with pytest.raises(MediaError, match="cut off"):
            read_file(data, RATE, 10)
    with pytest.raises(MediaError, match="has no sound in it"):
        read_file(_video(), RATE, 10)
    for value in (np.nan, -np.inf, 1e20):  # the last one's features would be NaN
        wrong = samples.copy()
        wrong[7] = value
        with pytest.raises(MediaError, match="NaN or infinite, or far beyond"):
            read_file(written(wrong, "WAV", subtype="FLOAT"), RATE, 10)


def _video() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream = out.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 16
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8))
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            out.mux(packet)
    return file.getvalue()


def test_a_wav_file_from_a_pipe_does_not_know_its_size() -> None:
    data = bytearray(wav(sound()))
    place = data.index(b"data") + 4
    data[place : place + 4] = b"\xff\xff\xff\xff"
    data[4:8] = b"\xff\xff\xff\xff"
    assert len(read_file(bytes(data), RATE, 10)) == len(sound())


@pytest.mark.parametrize("form", ["WAV", "MP3", "mp4"])
def test_a_sound_that_is_too_long_is_refused(form: str) -> None:
    samples = sound(seconds=6)
    data = written(samples, form) if form.isupper() else muxed(sound(seconds=6, rate=48_000), form, "aac")
    with pytest.raises(MediaError, match="the limit here"):
        read_file(data, RATE, 2)


def test_a_header_with_an_absurd_rate_is_refused() -> None:
    data = bytearray(wav(sound()))
    data[24:28] = (3).to_bytes(4, "little")
    with pytest.raises(MediaError, match="3 samples a second"):
        read_file(bytes(data), RATE, 10)


def test_clips_end_at_quiet_places() -> None:
    """None is longer than a second, all samples are in one of them, and the gaps are found."""
    samples = sound(seconds=3.3) + np.float32(0.05)
    gaps = [int(at * RATE) for at in (0.93, 1.86, 2.75)]
    for gap in gaps:
        samples[gap - 900 : gap + 900] = 0
    starts = clip_starts(samples, RATE, RATE)
    assert starts[0] == 0
    assert all(abs(start - gap) < 200 for start, gap in zip(starts[1:], gaps, strict=True))
    assert clip_starts(samples[:RATE], RATE, RATE) == [0]
    assert max(np.diff([*clip_starts(np.zeros(50_000, np.float32), RATE, RATE), 50_000])) <= RATE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    extractor().save_pretrained(tmp_path)
    return tmp_path


def test_features_are_the_librarys(folder: Path) -> None:
    """Of each clip, which has the library's padding."""
    samples = sound(seconds=2.4)
    found = SoundReader(str(folder)).read(ReadSound(wav(samples), 0, 10.0, divides=True))
    starts = clip_starts(as_read(samples), RATE, RATE)
    assert found.num_seconds == pytest.approx(2.4)
    assert [clip.start_seconds for clip in found.clips] == [start / RATE for start in starts]
    for clip, start, end in zip(found.clips, starts, [*starts[1:], len(samples)], strict=True):
        expected = features_of(as_read(samples)[start:end])
        np.testing.assert_array_equal(np.frombuffer(clip.values, "<f4").reshape(80, -1), expected)


# --------------------------------------------------------------------------------------------------- helper process


def ask(decoder: MediaDecoder, data: bytes) -> Sound:
    async def run() -> Sound:
        try:
            return await decoder.ask(ReadSound(data, 0, 10.0, divides=True), Sound, num_bytes=len(data), param="file")
        finally:
            decoder.close()

    return asyncio.run(run())


def test_a_helper_decodes_and_refuses(folder: Path) -> None:
    """The next question meets the same process."""

    async def run() -> None:
        decoder = MediaDecoder(str(folder))
        hearing = Hearing(decoder, EncoderSpec(vocab_size=1, max_rows=NUM_ROWS, num_channels=80))
        heard = await hearing.read_file(wav(sound()), "file", divides=False)
        [pid] = decoder.helper_pids
        assert heard.clips[0].features.values == features_of(as_read(sound())).tobytes()
        with pytest.raises(ParameterError, match="no sound file") as refused:
            await hearing.read_file(b"junk" * 100, "file", divides=False)
        assert refused.value.param == "file"
        with pytest.raises(ParameterError, match="hears 1 s"):
            await hearing.read_file(wav(sound(seconds=1.2)), "file", divides=False)
        given = await hearing.read_value((sound().astype(np.float64), RATE), "audio")
        assert given.clips[0].features.values == features_of(sound()).tobytes()
        stereo = np.stack((sound(), sound()))
        assert (await hearing.read_value((stereo, RATE), "audio")).clips == given.clips
        for wrong in ((sound(), 0), sound(), ((sound() * 100).astype(np.int16), RATE), "path", (sound(), RATE, 1)):
            with pytest.raises(ParameterError):
                await hearing.read_value(wrong, "audio")
        assert decoder.helper_pids == [pid]
        os.kill(pid, signal.SIGKILL)
        psutil.Process(pid).wait(10)
        assert await hearing.read_file(wav(sound()), "file", divides=False) == heard
        hearing.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("limits", "reason"), [({"limit_cpu_seconds": 0.001}, "processor time"), ({"limit_bytes": 2**12}, "memory")]
)
def test_limits_end_the_helper_or_the_question(folder: Path, limits: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        ask(MediaDecoder(str(folder), **limits), wav(sound(seconds=9.0, rate=192_000), 192_000))
