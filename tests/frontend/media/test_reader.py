"""Images of prompts: how they are named, and who waits for what."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.config.multimodal import MultimodalConfig
from quire.core.errors import ParameterError
from quire.core.wire.media import Array
from quire.frontend.keys.caller import Caller, set_caller
from quire.frontend.media.decoder import MediaDecoder
from quire.frontend.media.messages import DescribeImages, ItemFacts, ReadImage, ReadyItem
from quire.frontend.media.reader import MediaReader
from quire.frontend.media.shared_items import cache_of
from quire.frontend.media.sources import Content, MediaPart


class Decoder(MediaDecoder):
    """Stands for the processes that decode: an image has as many rows as bytes."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.most_at_once = self._at_once = 0
        self.queue: asyncio.Event | None = None  # a question waits for it before a helper begins
        self.work: asyncio.Event | None = None  # and a helper for this

    async def ask(
        self,
        question: Any,
        answer_type: Any,
        *,
        num_bytes: int,
        param: str,
        on_begin: Callable[[], None] = lambda: None,
    ) -> Any:
        if isinstance(question, DescribeImages):
            return ItemFacts("<image>", 7)
        assert isinstance(question, ReadImage)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await (self.queue.wait() if self.queue else asyncio.sleep(0))
            on_begin()
            self.begun.append(question.data)
            await (self.work.wait() if self.work else asyncio.sleep(0))
        finally:
            self._at_once -= 1
        if question.data == b"bad":
            raise ParameterError(f"{param} is no image.", param=param)
        return ReadyItem("<image>", len(question.data), {}, {"pixels": Array("|u1", (1,), b"0")}, question.data)


def reader_of(folder: Path, decoder: Decoder, *, cache_gb: float = 1.0) -> MediaReader:
    config = MultimodalConfig(mm_processor_cache_gb=cache_gb)
    return MediaReader(str(folder), config, decoder, lambda: ["image"], max_rows=lambda: 100, cache=cache_of(config))


def image(data: bytes | None, param: str = "image", uuid: str | None = None) -> MediaPart:
    return MediaPart("image", None if data is None else Content(data), param, uuid)


def act_as(name: str) -> None:
    options: dict[str, Any] = {"requests_per_minute": None, "tokens_per_minute": None}
    set_caller(Caller(name, weight=1, limits=None, count=lambda *_: None, is_alone=False, **options))  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("cache_gb", [0.0, 1.0])
def test_the_engine_knows_images_by_what_they_are(cache_gb: float, tmp_path: Path) -> None:
    """A client may give two images one uuid, and find the first under it, but their rows are never confused."""

    async def run() -> None:
        reader = reader_of(tmp_path, Decoder(), cache_gb=cache_gb)
        [first], [second] = [await reader.read([image(data, uuid="cat")]) for data in (b"one", b"other")]
        assert (second.digest == first.digest) == bool(cache_gb)
        assert (second.num_rows == first.num_rows) == bool(cache_gb)

    asyncio.run(run())


def test_a_uuid_is_of_its_key_alone(tmp_path: Path) -> None:
    async def run() -> None:
        reader = reader_of(tmp_path, Decoder())
        act_as("alice")
        await reader.read([image(b"secret", uuid="cat")])
        assert (await reader.read([image(None, uuid="cat")]))[0].digest == b"secret"
        act_as("bob")
        with pytest.raises(ParameterError, match="no item"):
            await reader.read([image(None, uuid="cat")])

    asyncio.run(run())


def test_a_prompt_reads_few_images_at_once_and_no_more_than_fit(tmp_path: Path) -> None:
    async def run() -> None:
        decoder = Decoder()
        reader = reader_of(tmp_path, decoder)
        items = await reader.read([image(b"%02d" % number) for number in range(50)])
        assert [item.digest for item in items] == [b"%02d" % number for number in range(50)]
        assert decoder.most_at_once == 4
        decoder.begun = []
        parts = [image(b"a%029d" % number, f"image {number}") for number in range(50)]
        with pytest.raises(ParameterError, match=r"image 3 .* 120 tokens or more, and a prompt has 100"):
            await reader.read(parts)
        await settle()
        assert len(decoder.begun) < 10

    asyncio.run(run())


def test_an_image_that_two_wait_for_is_read_once_and_refused_by_each_ones_name(tmp_path: Path) -> None:
    async def run() -> None:
        decoder = Decoder()
        reader = reader_of(tmp_path, decoder)
        reads = [reader.read([image(b"bad", name)]) for name in ("messages[0]", "messages[7]")]
        errors = await asyncio.gather(*reads, return_exceptions=True)
        assert [(str(error), error.param) for error in errors if isinstance(error, ParameterError)] == [
            ("messages[0] is no image.", "messages[0]"),
            ("messages[7] is no image.", "messages[7]"),
        ]
        assert decoder.begun == [b"bad"]

    asyncio.run(run())


def test_an_image_that_nobody_waits_for_any_more_leaves_the_queue(tmp_path: Path) -> None:
    """One that a helper works on is read to its end: the helper would have to load its libraries again."""

    async def run() -> None:
        decoder = Decoder()
        decoder.queue, decoder.work = asyncio.Event(), asyncio.Event()
        reader = reader_of(tmp_path, decoder)
        one, other = (asyncio.create_task(reader.read([image(b"image")])) for _ in range(2))
        left = asyncio.create_task(reader.read([image(b"left")]))
        await settle()
        one.cancel()
        left.cancel()
        await settle()
        again = asyncio.create_task(reader.read([image(b"image")]))
        decoder.queue.set()
        await settle()
        assert decoder.begun == [b"image"]
        other.cancel()
        again.cancel()
        await settle()
        decoder.work.set()
        await settle()
        assert (await reader.read([image(b"image")]))[0].digest == b"image"
        assert decoder.begun == [b"image"]

    asyncio.run(run())
