"""Images and sounds as clients may damage them, through real helpers: an answer or a refusal, and later ones are read
as before."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ParameterError
from quire.frontend.media.decoder import MediaDecoder
from quire.frontend.media.messages import ReadImage, ReadSound, ReadyItem, Sound
from tests.fuzz.examples import fuzzed, mutated
from tests.fuzz.media_files import image_files, sound_files
from tests.image_checkpoints import write_checkpoint
from tests.tiny_whisper import write_whisper


def image(data: bytes) -> tuple[Any, type]:
    return ReadImage(data, None, 100_000), ReadyItem


def sound(data: bytes) -> tuple[Any, type]:
    return ReadSound(data, 0, 5.0, divides=True), Sound


def check(answer: Any) -> None:
    if isinstance(answer, ReadyItem):
        assert answer.num_rows > 0
        assert len(answer.digest) >= 16
        return
    assert answer.clips
    assert all(np.isfinite(np.frombuffer(clip.values, "<f4")).all() for clip in answer.clips)


@pytest.mark.parametrize("kind", ["images", "sounds"])
def test_files(kind: str, tmp_path: Path) -> None:
    question: Callable[[bytes], tuple[Any, type]]
    if kind == "images":
        folder, question, files = write_checkpoint(tmp_path / "model", "llava"), image, image_files()
    else:
        folder, question, files = tmp_path, sound, sound_files()
        write_whisper(folder)
    decoder = MediaDecoder(str(folder))

    async def ask(data: bytes) -> Any:
        asked, answer = question(data)
        return await decoder.ask(asked, answer, num_bytes=len(data), param="the file")

    with asyncio.Runner() as runner:

        @fuzzed(60)
        @given(st.one_of(st.binary(max_size=60), st.sampled_from(files).flatmap(mutated)))
        def run(data: bytes) -> None:
            with contextlib.suppress(ParameterError):
                check(runner.run(ask(data)))

        before = [runner.run(ask(each)) for each in files]
        for answer in before:
            check(answer)
        run()
        for each, answer in zip(files, before, strict=True):
            assert runner.run(ask(each)) == answer
        decoder.close()
