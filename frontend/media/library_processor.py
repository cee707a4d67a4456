"""The model's processor, as the Transformers library has it: makes an item's arrays and the text of its placeholders.

Only helper processes import this: the library takes seconds to load.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoVideoProcessor, PretrainedConfig
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.processing_utils import ProcessingKwargs, ProcessorMixin

from quire.core.logging import get_logger
from quire.core.wire.media import ROW_IDS, Array, Modality
from quire.frontend.media.errors import MediaError, UnknownKeywordError
from quire.frontend.media.messages import Additions, ItemFacts, ReadyItem

logger = get_logger(__name__)

_BEFORE, _BETWEEN, _AFTER = "quirebefore ", " quirebetween ", " quireafter"
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "video_metadata", "labels")
_FACT_BYTES = 4096
_BORDERS = "visual_indicator_token_ids"
"""The field of a configuration with the tokens around rows that the tower makes as well."""
_HEARD, _HEARD_LENGTHS = "feature_attention_mask", "audio_feature_lengths"
_KEYWORDS: Mapping[Modality, str] = {"image": "images", "audio": "audio", "video": "videos"}
"""The names of items in a call of a processor."""
_TENSORS: Mapping[Modality, str] = {"image": "np", "audio": "pt", "video": "pt"}
"""What a processor shall return. Some of sounds, and those of videos, make tensors of torch alone."""
_PARTS: Mapping[Modality, str] = {
    "image": "image_processor", "audio": "feature_extractor", "video": "video_processor"
}  # fmt: skip
"""The parts of a processor that know keywords of each kind."""
_OURS = frozenset({
    *("return_tensors", "device", "data_format", "input_data_format", "disable_grouping", "do_sample_frames"),
    *("video_metadata", "return_metadata", "sampling_rate"),
})  # fmt: skip
"""Keywords that no client sets: they say what goes in and what comes out."""


class _Tokenizer:
    """Notes the text that a processor tokenizes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, *args, **kwargs)


class Mark(Struct, frozen=True):
    """What stands for an item.

    Attributes:
        text: in a prompt, before it is expanded.
        token_id: of each of the tower's rows.
        border_ids: of tokens around these, whose embeddings the model makes of its tower, too.
    """

    text: str
    token_id: int
    border_ids: tuple[int, ...] = ()

    @property
    def facts(self) -> ItemFacts:
        """How such items stand in prompts."""
        return ItemFacts(self.text, self.token_id, border_ids=self.border_ids)


class LibraryProcessor:
    """The processor of one checkpoint. The library raises anything where it does not understand a file or an item.

    Attributes:
        processor: the library's own.
        config: of the model.
    """

    def __init__(self, processor: ProcessorMixin, config: PretrainedConfig) -> None:
        self.processor: Any = processor
        self.config = config
        self._additions = Additions()

    def mark(self, modality: Modality) -> Mark:
        """What stands for an item of a kind. Raises ValueError if nothing does."""
        text = getattr(self.processor, f"{modality}_token", None)
        token_id = _token_id(self.config, modality)
        if token_id is None or not isinstance(text, str):
            raise ValueError(f"it has no token that stands for an item of type {modality}")
        borders = getattr(self.config, _BORDERS, None) if modality == "image" else None
        return Mark(text, token_id, tuple(borders or ()))

    def keywords(self, modality: Modality) -> frozenset[str]:
        """The keywords that it knows for items of a kind, and that a client may set."""
        group = f"{_KEYWORDS[modality]}_kwargs"
        kinds = getattr(type(self.processor), "valid_processor_kwargs", ProcessingKwargs).__annotations__
        part = getattr(self.processor, _PARTS[modality], None)
        return frozenset(getattr(kinds.get(group), "__annotations__", {})) - _OURS | keywords_of(part)

    def choose(self, modality: Modality, options: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords among `options` that concern items of a kind. They may be in an object for it, such as
        `images_kwargs`.

        Raises:
            UnknownKeywordError: no kind of item has one of them.
        """
        kinds = {f"{_KEYWORDS[kind]}_kwargs": self.keywords(kind) for kind in _KEYWORDS}
        every = frozenset().union(*kinds.values())
        chosen: dict[str, Any] = {}
        for name, value in options.items():
            if name in kinds and isinstance(value, Mapping):
                if unknown := sorted(set(value) - kinds[name]):
                    raise UnknownKeywordError(f"{name}.{unknown[0]}", kinds[name])
                if name == f"{_KEYWORDS[modality]}_kwargs":
                    chosen.update(value)
            elif name not in every:
                raise UnknownKeywordError(name, every)
            elif name in self.keywords(modality):
                chosen.setdefault(name, value)
        return chosen

    def read(
        self,
        modality: Modality,
        value: Any,
        options: Mapping[str, Any],
        ours: Mapping[str, Any] | None = None,
    ) -> ReadyItem:
        """Makes arrays of one item of a client.

        Args:
            options: the client's keywords.
            ours: further ones.

        Raises:
            MediaError: the processor does not take the item.
        """
        chosen = self.choose(modality, options)
        return taken(lambda: self.process(modality, value, {**chosen, **(ours or {})}))

    def learn_additions(self, image: Any) -> Additions:
        """Finds what the processor writes into texts with images, by those of one and of two images. Later calls of
        `process` leave it out.

        Raises:
            ValueError: it changes texts in another way.
        """
        mark = self.mark("image")
        self.processor(text=[_BEFORE + mark.text + _AFTER], images=[image], return_tensors="np")
        _, _, at_end = self._seen().rpartition(_AFTER)
        if not at_end:
            return self._additions
        text = _BEFORE + mark.text + _BETWEEN + mark.text + _AFTER
        self.processor(text=[text], images=[image, image], return_tensors="np")
        first, _, second = self._seen().removeprefix(_BEFORE).removesuffix(_AFTER + at_end).partition(_BETWEEN)
        if not second.startswith(first):
            raise ValueError("it changes the text around images")
        self._additions = Additions(second.removeprefix(first), at_end)
        return self._additions

    def _seen(self) -> str:
        """The text that the processor tokenized last."""
        text: str = self.processor.tokenizer.text
        return text

    def process(self, modality: Modality, value: Any, options: Mapping[str, Any]) -> ReadyItem:
        """Makes arrays of one item."""
        mark = self.mark(modality)
        text = _BEFORE + mark.text + _AFTER
        items = {_KEYWORDS[modality]: [value]}
        made = self.processor(text=[text], return_tensors=_TENSORS[modality], **items, **options)
        added = self._additions if modality == "image" else Additions()
        seen, end = self._seen(), added.after_last + _AFTER + added.at_end
        if not (seen.startswith(_BEFORE) and seen.endswith(end)):
            raise ValueError("it changes the text around an item")
        token_ids = np.asarray(made["input_ids"])
        row_ids = token_ids[np.isin(token_ids, [mark.token_id, *mark.border_ids])]
        num_rows = len(row_ids)
        if not num_rows:
            raise ValueError("it makes no tokens of an item")
        values = {name: np.asarray(value) for name, value in made.items() if name not in _OF_TEXT}
        if mark.border_ids:
            values[ROW_IDS] = row_ids[None].astype(np.int64)
        if _HEARD in values:  # what the places of tokens follow from is a small array
            values[_HEARD_LENGTHS] = values[_HEARD].sum(axis=-1, dtype=np.int64)
        return ready_item(modality, seen[len(_BEFORE) : len(seen) - len(end)], num_rows, values)


def keywords_of(part: Any) -> frozenset[str]:
    """The keywords that a processor of one kind of items knows, and that a client may set."""
    return frozenset(getattr(getattr(part, "valid_kwargs", None), "__annotations__", {})) - _OURS


def taken(process: Callable[[], ReadyItem]) -> ReadyItem:
    """What a processor makes of an item. Raises MediaError for whatever it raises: it may be anything for a size or a
    length that it does not expect."""
    try:
        return process()
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        raise MediaError(
            f"is not taken by the model's processor ({type(error).__name__}: {str(error)[:300]})"
        ) from None


def facts_of(load: Callable[[], ItemFacts]) -> ItemFacts:
    """The facts of a kind of items, or the fault of what is loaded for it: the library raises anything for files that
    it does not understand."""
    try:
        return load()
    except Exception as error:
        return ItemFacts(fault=" ".join(f"{type(error).__name__}: {error}".split()))


def check_usable(facts: ItemFacts) -> None:
    """Raises MediaError if items of a kind cannot be read."""
    if facts.fault:
        raise MediaError(f"cannot be read, because the model's processor is not usable ({facts.fault})")


def ready_item(modality: Modality, text: str, num_rows: int, values: Mapping[str, np.ndarray]) -> ReadyItem:
    """An item of arrays by the names that the model's class has for them."""
    arrays = {name: _array(value) for name, value in values.items()}
    facts = {name for name, value in values.items() if _is_fact(value)}
    return ReadyItem(
        text,
        num_rows,
        {name: array for name, array in arrays.items() if name in facts},
        {name: array for name, array in arrays.items() if name not in facts},
        _digest(modality, num_rows, arrays),
    )


@functools.cache
def prepare() -> None:
    """Has the library read processors by Pillow, and leave out those that it cannot load."""
    AutoVideoProcessor.from_pretrained = classmethod(_read_videos)  # type: ignore[method-assign, assignment]
    AutoImageProcessor.from_pretrained = classmethod(_read_images)  # type: ignore[method-assign, assignment]
    ProcessorMixin.check_argument_for_proper_class = _check_others  # type: ignore[method-assign]


@functools.cache
def load_processor(folder: str) -> LibraryProcessor:
    """The processor of a checkpoint, which is read once."""
    prepare()
    config = read_config(folder)
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if _reader_of(config) is not config:
        processor = _inner_processor(processor, _reader_of(config))
    if not isinstance(processor, ProcessorMixin):
        raise ValueError("the checkpoint's files name no processor of images or sounds")
    processor.tokenizer = _Tokenizer(processor.tokenizer)
    return LibraryProcessor(processor, _reader_of(config))


def read_config(folder: str) -> PretrainedConfig:
    """The configuration of a checkpoint's model: of one that speaks as well, of its part that writes text."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return getattr(config, "thinker_config", config)


def _reader_of(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of what reads images: of a model for retrieval, that of the one inside."""
    return getattr(config, "vlm_config", config)


def _inner_processor(processor: Any, config: PretrainedConfig) -> Any:
    """The processor of the model inside one for retrieval: that one's own writes the text around an image itself."""
    kind: Any = PROCESSOR_MAPPING[type(config)]
    parts = {"image_processor": processor.image_processor, "tokenizer": processor.tokenizer}
    return kind(**parts, chat_template=processor.chat_template)


def _token_id(config: PretrainedConfig, modality: Modality) -> int | None:
    names = (f"{modality}_token_id", f"{modality}_token_index")
    owners = (config, getattr(config, f"{modality}_config", None), getattr(config, "vision_config", None))
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _is_fact(value: np.ndarray) -> bool:
    most = {"i": 2, "f": 1}.get(value.dtype.kind, 0)  # dimensions
    return value.ndim <= most and value.nbytes <= _FACT_BYTES


def _array(value: np.ndarray) -> Array:
    if value.dtype == np.float64:
        value = value.astype(np.float32)
    return Array(value.dtype.newbyteorder("<").str, value.shape, np.ascontiguousarray(value).tobytes())


def _digest(modality: Modality, num_rows: int, arrays: Mapping[str, Array]) -> bytes:
    """Names an item by what the tower reads of it."""
    digest = hashlib.sha256(b"%s:%d" % (modality.encode(), num_rows))
    for name, array in sorted(arrays.items()):
        digest.update(f":{name}:{array.dtype}:{array.shape}:".encode())
        digest.update(array.data)
    return digest.digest()


_load_images: Any = vars(AutoImageProcessor)["from_pretrained"].__func__
_load_videos: Any = vars(AutoVideoProcessor)["from_pretrained"].__func__


def _read_images(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Reads an image processor, in its form for Pillow if it has one; None where it needs the whole of torchvision,
    which sounds do without."""
    try:
        return _load_images(kind, *args, **{"backend": "pil", **kwargs})
    except (ImportError, ValueError) as error:
        if "torchvision" not in str(error):
            raise
        return None


def _read_videos(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Reads a video processor; None where the checkpoint's files have none that is understood."""
    try:
        return _load_videos(kind, *args, **kwargs)
    except (ImportError, OSError, TypeError, ValueError) as error:
        logger.info("no videos are read: %s", error)
        return None


_check = ProcessorMixin.check_argument_for_proper_class


def _check_others(self: Any, name: str, argument: Any) -> Any:
    """Checks a processor's parts, but not those that are left out."""
    return None if argument is None else _check(self, name, argument)
