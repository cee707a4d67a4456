"""Reads images, videos and sounds of requests: fetches them, and has a helper process decode and process each once."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from quire.core import envs
from quire.core.config.multimodal import MultimodalConfig
from quire.core.errors import ParameterError
from quire.core.logging import get_logger
from quire.core.wire.media import Array, Modality
from quire.frontend.keys.caller import current_owner
from quire.frontend.media.decoder import MediaDecoder
from quire.frontend.media.files import Files
from quire.frontend.media.item_cache import ItemCache
from quire.frontend.media.messages import (
    DescribeAudio,
    DescribeImages,
    DescribeVideo,
    DividedSound,
    DivideSound,
    ItemFacts,
    MediaQuestion,
    ReadAudio,
    ReadImage,
    ReadPage,
    ReadRows,
    ReadVideo,
    ReadyItem,
)
from quire.frontend.media.settings import MediaSettings, Overrides
from quire.frontend.media.shared_work import SharedWork
from quire.frontend.media.sources import Content, MediaPart, Sources

logger = get_logger(__name__)

_SETTINGS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "config.json")
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
        cache: keeps processed items.
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
        cache: ItemCache,
        on_item: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._config = config
        self._decoder = decoder
        self._kinds = kinds
        self._max_rows = max_rows
        self._on_item = on_item
        self._sources = Sources(config)
        self._files = Files(self._sources, decoder, self._settings_of)
        self._server_settings = MediaSettings.of(config, Overrides())
        self._max_pixels = int(envs.read_float("MAX_IMAGE_PIXELS"))
        self._files_digest: bytes | None = None
        self._max_seconds = envs.read_float("MAX_AUDIO_DECODE_DURATION_S")
        self._facts: dict[Modality, ItemFacts] = {}
        self._cache = cache
        self._work = SharedWork()

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

    async def open(self, parts: Sequence[MediaPart]) -> list[list[MediaPart]]:
        """For each part, its items: a file may have several.

        Raises:
            ParameterError: the model does not read such items, there are too many, or a file cannot be read.
            UnavailableError: the host is too busy.
        """
        self.check(parts)
        groups = [await self._files.open(part) for part in parts]
        self.check([part for group in groups for part in group])
        return groups

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
        made = await self._cache.get(name)
        self._on_item(made is not None)
        if made is None:
            if part.source is None:
                raise part.refusal(f"has nothing but the uuid {part.uuid!r}, under which this server has no item")
            made = await self._process(part, content or await self._sources.read(part), name)
        return ReadItem(part.modality, part.param, made.digest, made.text, made.num_rows, made.facts, made.arrays)

    async def _process(self, part: MediaPart, content: Content, name: bytes) -> ReadyItem:
        async def ask(first: MediaPart, begin: Callable[[], None]) -> ReadyItem:
            made = await self._decoder.ask(
                self._question(first, content),
                ReadyItem,
                num_bytes=len(content.data) + len(content.grid or b""),
                param=first.param,
                on_begin=begin,
            )
            await self._cache.put(name, made)
            return made

        return await self._work.run(name, part, ask)

    def _question(self, part: MediaPart, content: Content) -> MediaQuestion:
        settings = self._settings_of(part)
        if content.grid is not None:
            return ReadRows(content.data, content.grid)
        if part.modality == "video":
            return ReadVideo(content.data, content.frames, settings.sampling, self._max_pixels, settings.processor)
        if part.modality == "audio":
            return ReadAudio(content.data, content.rate, self._max_seconds, settings.processor)
        if content.page is not None:
            page = content.page
            return ReadPage(content.data, page.number, page.dpi, self._max_pixels, settings.processor)
        background = settings.background
        return ReadImage(content.data, content.pixels, self._max_pixels, settings.processor, background)

    def _settings_of(self, part: MediaPart) -> MediaSettings:
        if part.overrides.field is None:
            return self._server_settings
        return MediaSettings.of(self._config, part.overrides)

    def _name(self, part: MediaPart, content: Content | None) -> bytes:
        """Names an item: by its content, or as the client did, among the items of its key; and by the settings."""
        if self._files_digest is None:
            self._files_digest = _files_digest(self._folder)
        settings = self._settings_of(part).digest
        digest = hashlib.sha256(self._files_digest + settings + part.modality.encode() + b":")
        if content is None:
            digest.update(b"uuid:" + msgspec.msgpack.encode(current_owner()))
            digest.update(str(part.uuid).encode("utf-8", "surrogatepass"))
        else:
            content.update(digest)
        return digest.digest()

    def close(self) -> None:
        """Ends the processes that decode."""
        self._decoder.close()
        self._cache.close()


def _files_digest(folder: str) -> bytes:
    """Names the files that say how a checkpoint's items are processed."""
    digest = hashlib.sha256()
    for name in _SETTINGS:
        path = Path(folder) / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.digest()
