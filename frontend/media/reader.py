"""Reads images, videos and sounds of requests: fetches them, and has a helper process decode and process each once."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from quire.core import envs
from quire.core.config.multimodal import MultimodalConfig
from quire.core.errors import ParameterError
from quire.core.logging import get_logger
from quire.core.wire.media import Array, Modality
from quire.frontend.keys.caller import current_owner
from quire.frontend.media.decoder import MediaDecoder
from quire.frontend.media.messages import (
    DescribeAudio,
    DescribeImages,
    DescribeVideo,
    DividedSound,
    DivideSound,
    ItemFacts,
    ReadAudio,
    ReadImage,
    ReadRows,
    ReadVideo,
    ReadyItem,
    Sampling,
)
from quire.frontend.media.sources import Content, MediaPart, Sources

logger = get_logger(__name__)

_SETTINGS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "config.json")
_GIB = 2**30
_DESCRIBE: Mapping[Modality, type[DescribeImages | DescribeAudio | DescribeVideo]] = {
    "image": DescribeImages, "audio": DescribeAudio, "video": DescribeVideo
}  # fmt: skip
_AT_ONCE = 4
"""Items of one prompt that are fetched and decoded at the same time: the file of one may be large."""
_INLINE_BYTES = 2**20
"""Longer contents are hashed in a thread (a millisecond for so many bytes)."""


class ReadItem(Struct, frozen=True):
    """An item of a prompt, as the tower reads it.

    Attributes:
        digest: of what the tower reads, whatever the client calls the item.
        text: replaces the placeholder in the prompt.
        num_rows: tokens of the text that the tower makes rows for.
    """

    modality: Modality
    param: str
    digest: bytes
    text: str
    num_rows: int
    facts: dict[str, Array]
    arrays: dict[str, Array]


class MediaReader:
    """Reads items for one model. To be used from one event loop.

    Args:
        folder: the checkpoint's, with the processor's files.
        config: what may be read.
        decoder: decodes items, in another process.
        kinds: what the engine's model reads; it is known once the engine has started.
        max_rows: the most tokens of a prompt, once the engine has started.
        on_item: is told of each item whether it is kept from before.
    """

    def __init__(
        self,
        folder: str,
        config: MultimodalConfig,
        decoder: MediaDecoder,
        kinds: Callable[[], Sequence[Modality]],
        *,
        max_rows: Callable[[], int],
        on_item: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._config = config
        self._decoder = decoder
        self._kinds = kinds
        self._max_rows = max_rows
        self._on_item = on_item
        self._sources = Sources(config)
        self._options = config.mm_processor_kwargs or {}
        self._sampling = Sampling(**config.io_options("video"))
        self._max_pixels = int(envs.read_float("MAX_IMAGE_PIXELS"))
        self._settings: bytes | None = None
        self._max_seconds = envs.read_float("MAX_AUDIO_DECODE_DURATION_S")
        self._facts: dict[Modality, ItemFacts] = {}
        self._running: dict[bytes, _Work] = {}  # by name, as in the cache
        self._cache = _Cache(int(config.mm_processor_cache_gb * _GIB))

    @property
    def interleaves(self) -> bool:
        """True if items stay where they are among a message's texts."""
        return self._config.interleave_mm_strings

    @property
    def kinds(self) -> Sequence[Modality]:
        """What the model reads besides text, once the engine has started."""
        return self._kinds()

    def forget(self) -> None:
        """Forgets the items that are kept for later prompts."""
        self._cache.clear()

    def check(self, parts: Sequence[MediaPart]) -> None:
        """Raises ParameterError if the model does not read such items, or a prompt must not have as many."""
        for part in parts:
            if part.modality not in self._kinds():
                raise part.refusal(f"is of type {part.modality}, but this model reads text only")
            is_given = isinstance(part.source, Content) and part.source.grid is not None
            if is_given and not self._config.enable_mm_embeds:
                raise part.refusal("has rows of a tower, and this server was started without --enable-mm-embeds")
            limit = self._config.limit_of(part.modality)
            if sum(each.modality == part.modality for each in parts) > limit:
                raise part.refusal(
                    f"is one of more items of type {part.modality} than a prompt may have: {limit} "
                    "(--limit-mm-per-prompt)"
                )

    async def facts(self, modality: Modality, param: str = "messages") -> ItemFacts:
        """How items of one kind stand in prompts. Errors name `param`.

        Raises:
            ParameterError: the model's processor cannot be used here.
        """
        facts = self._facts.get(modality)
        if facts is None:
            facts = await self._decoder.ask(_DESCRIBE[modality](), ItemFacts, num_bytes=0, param=param)
            self._facts[modality] = facts
            if facts.fault:
                logger.warning(
                    "items of type %s are refused: the processor in %s fails: %s", modality, self._folder, facts.fault
                )
        if facts.fault:
            raise ParameterError(
                f"Items of type {modality} cannot be read here, because the model's processor is not usable: "
                f"{facts.fault}",
                param=param,
            )
        return facts

    async def facts_of(self, parts: Sequence[MediaPart]) -> dict[Modality, ItemFacts]:
        """The facts of all kinds of items among `parts`. Raises ParameterError as `facts` does."""
        return {modality: await self.facts(modality) for modality in dict.fromkeys(part.modality for part in parts)}

    async def read(self, parts: Sequence[MediaPart]) -> list[ReadItem]:
        """The items of a prompt, in order.

        Raises:
            ParameterError: an item cannot be read; `param` is its name.
            UnavailableError: the host is too busy.
        """
        self.check(parts)
        await self.facts_of(parts)
        room, num_rows = asyncio.Semaphore(_AT_ONCE), 0

        async def read(part: MediaPart) -> ReadItem:
            nonlocal num_rows
            async with room:
                item = await self._read(part)
            num_rows += item.num_rows
            if num_rows > (most := self._max_rows()):
                raise part.refusal(
                    f"is too much: the prompt's items have {num_rows} tokens or more, and a prompt has {most} at most"
                )
            return item

        try:
            async with asyncio.TaskGroup() as group:  # the first error ends the others
                tasks = [group.create_task(read(part)) for part in parts]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def divide(self, data: bytes, param: str, clip_seconds: float | None) -> DividedSound:
        """Decodes a sound file, in parts of `clip_seconds` at most; None: only what the model hears at once.

        Raises:
            ParameterError: it cannot be read; `param` is its name.
            UnavailableError: the host is too busy.
        """
        await self.facts("audio", param)
        question = DivideSound(data, self._max_seconds, clip_seconds)
        return await self._decoder.ask(question, DividedSound, num_bytes=len(data), param=param)

    async def _read(self, part: MediaPart) -> ReadItem:
        content = None
        if part.uuid is None:
            content = await self._sources.read(part)
        if content is not None and len(content.data) > _INLINE_BYTES:
            name = await asyncio.to_thread(self._name, part, content)
        else:
            name = self._name(part, content)
        made = self._cache.get(name)
        self._on_item(made is not None)
        if made is None:
            if part.source is None:
                raise part.refusal(f"has nothing but the uuid {part.uuid!r}, under which this server has no item")
            made = await self._process(part, content or await self._sources.read(part), name)
        return ReadItem(part.modality, part.param, made.digest, made.text, made.num_rows, made.facts, made.arrays)

    async def _process(self, part: MediaPart, content: Content, name: bytes) -> ReadyItem:
        work = self._running.get(name)
        if work is None:
            work = self._running[name] = _Work(part)
            work.task = asyncio.create_task(self._ask(work, content))
            work.task.add_done_callback(lambda _: self._on_processed(name, work))
        work.num_waiting += 1
        try:
            return await asyncio.shield(work.task)  # other requests may wait for the same task
        except ParameterError as error:
            if work.part.param == part.param:
                raise
            raise ParameterError(str(error).replace(work.part.param, part.param, 1), param=part.param) from None
        finally:
            work.num_waiting -= 1
            if not work.num_waiting and not work.has_begun:  # a helper that has begun would end, and load again
                self._forget(name, work)
                work.task.cancel()

    def _on_processed(self, name: bytes, work: "_Work") -> None:
        self._forget(name, work)
        if not work.task.cancelled() and work.task.exception() is None:
            self._cache.put(name, work.task.result())

    def _forget(self, name: bytes, work: "_Work") -> None:
        if self._running.get(name) is work:
            del self._running[name]

    async def _ask(self, work: "_Work", content: Content) -> ReadyItem:
        return await self._decoder.ask(
            self._question(work.part, content),
            ReadyItem,
            num_bytes=len(content.data) + len(content.grid or b""),
            param=work.part.param,
            on_begin=work.begin,
        )

    def _question(self, part: MediaPart, content: Content) -> ReadImage | ReadAudio | ReadVideo | ReadRows:
        if content.grid is not None:
            return ReadRows(content.data, content.grid)
        if part.modality == "video":
            return ReadVideo(content.data, content.frames, self._sampling, self._max_pixels, self._options)
        if part.modality == "audio":
            return ReadAudio(content.data, content.rate, self._max_seconds, self._options)
        return ReadImage(content.data, content.pixels, self._max_pixels, self._options)

    def _name(self, part: MediaPart, content: Content | None) -> bytes:
        """Names an item: by its content, or as the client did, among the items of its key; and by the processor's
        settings."""
        if self._settings is None:
            self._settings = _settings_digest(self._folder, self._options, self._sampling)
        digest = hashlib.sha256(self._settings + part.modality.encode() + b":")
        if content is None:
            digest.update(b"uuid:" + msgspec.msgpack.encode(current_owner()))
            digest.update(str(part.uuid).encode("utf-8", "surrogatepass"))
        else:
            digest.update(b"content:" + msgspec.msgpack.encode(content.form))
            digest.update(content.data)
        return digest.digest()

    def close(self) -> None:
        """Ends the processes that decode."""
        self._decoder.close()


class _Work:
    """An item that is being processed for those who wait for it.

    Args:
        part: the first one's.
    """

    task: "asyncio.Task[ReadyItem]"

    def __init__(self, part: MediaPart) -> None:
        self.part = part
        self.num_waiting = 0
        self.has_begun = False

    def begin(self) -> None:
        """Notes that a helper works on it."""
        self.has_begun = True


class _Cache:
    """Processed items, of which those unused for longest are forgotten first.

    Args:
        max_bytes: of all arrays.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items: OrderedDict[bytes, ReadyItem] = OrderedDict()

    def get(self, digest: bytes) -> ReadyItem | None:
        if digest in self._items:
            self._items.move_to_end(digest)
        return self._items.get(digest)

    def put(self, digest: bytes, made: ReadyItem) -> None:
        if digest in self._items:
            return
        self._items[digest] = made
        self._num_bytes += _size(made)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._items.popitem(last=False)
            self._num_bytes -= _size(oldest)

    def clear(self) -> None:
        self._items.clear()
        self._num_bytes = 0


def _size(made: ReadyItem) -> int:
    return sum(len(array.data) for arrays in (made.facts, made.arrays) for array in arrays.values())


def _settings_digest(folder: str, options: dict[str, Any], sampling: Sampling) -> bytes:
    digest = hashlib.sha256(msgspec.json.encode((options, sampling), order="deterministic"))
    for name in _SETTINGS:
        path = Path(folder) / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.digest()
