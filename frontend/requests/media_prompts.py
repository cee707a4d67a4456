"""Reads prompts with images, videos and sounds: text and items become token ids, and the places of the items' rows."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from quire.core.errors import ParameterError
from quire.core.wire.media import MediaItem, Modality
from quire.frontend.media.frames import is_video
from quire.frontend.media.messages import ItemFacts
from quire.frontend.media.placing import expand, expand_ids, place, with_added_ids, with_additions
from quire.frontend.media.reader import MediaReader, ReadItem
from quire.frontend.media.samples import is_sound
from quire.frontend.media.settings import PROCESSOR_KWARGS, Overrides
from quire.frontend.media.sources import Content, MediaPart, content_of, is_rows
from quire.frontend.requests.async_tokenizer import AsyncTokenizer
from quire.frontend.requests.prompt import Prompt

_DATA, _UUIDS = "multi_modal_data", "multi_modal_uuids"


class MediaPrompts:
    """Reads prompts that have items.

    Args:
        reader: reads the items themselves.
        tokenizer: makes token ids of texts.
    """

    def __init__(self, reader: MediaReader, tokenizer: AsyncTokenizer) -> None:
        self.reader = reader
        self._tokenizer = tokenizer

    async def read(
        self,
        text: str,
        parts: Sequence[MediaPart],
        *,
        add_special_tokens: bool = True,
        must_fit: bool = True,
        param: str = "prompt",
    ) -> Prompt:
        """Reads a text with a placeholder for each item.

        Raises:
            ParameterError: an item cannot be read, or the placeholders are not as many.
            UnavailableError: the host is too busy.
        """
        items = await self.reader.read(parts)
        facts = await self.reader.facts_of(parts)
        if any(each.is_whole for each in facts.values()):
            return _alone(items, text, param)
        whole = text
        for each in _writing(facts):
            whole = with_additions(whole, each.placeholder, each.additions)
            add_special_tokens = False  # a processor that writes into texts writes these itself
        expanded = expand(whole, items, _placeholders(facts), param)
        token_ids = await self._tokenizer.tokenize(expanded, add_special_tokens=add_special_tokens, must_fit=must_fit)
        return Prompt(text, token_ids, media=place(token_ids, items, _marks(facts), param))

    async def read_ids(self, token_ids: list[int], parts: Sequence[MediaPart], *, param: str = "prompt") -> Prompt:
        """Reads token ids with a placeholder for each item, like `read`."""
        items = await self.reader.read(parts)
        facts = await self.reader.facts_of(parts)
        if any(each.is_whole for each in facts.values()):
            return _alone(items, token_ids, param)
        encode = functools.partial(self._tokenizer.tokenizer.encode, add_special_tokens=False)
        for each in _writing(facts):
            token_ids = with_added_ids(token_ids, encode, each.placeholder, each.additions)
        expanded = expand_ids(token_ids, items, encode, _placeholders(facts), param)
        return Prompt(None, expanded, media=place(expanded, items, _marks(facts), param))


def _alone(items: Sequence[ReadItem], beside: str | list[int], param: str) -> Prompt:
    """The prompt of an image that is no part of a text: one token stands for its vector.

    Args:
        beside: what the prompt has besides.
    """
    if len(items) > 1 or (beside.strip() if isinstance(beside, str) else beside):
        what = "a text beside an image" if len(items) == 1 else f"{len(items)} images"
        raise ParameterError(
            f"This model makes a vector of a text or of one image, and the prompt has {what}; send each as a prompt of "
            "its own.",
            param=param,
        )
    [item] = items
    return Prompt(None, [0], media=[MediaItem(item.modality, item.digest, [(0, 1)], item.facts, item.arrays)])


def _writing(facts: Mapping[Modality, ItemFacts]) -> list[ItemFacts]:
    """The kinds of items with which the model's processor writes more into a text than they are."""
    return [each for each in facts.values() if each.additions]


def _placeholders(facts: Mapping[Modality, ItemFacts]) -> dict[Modality, str]:
    return {modality: each.placeholder for modality, each in facts.items()}


def _marks(facts: Mapping[Modality, ItemFacts]) -> dict[Modality, set[int]]:
    return {modality: {each.token_id, *each.border_ids} for modality, each in facts.items()}


def parts_of(prompt: Any) -> list[MediaPart]:
    """The items of a prompt that is a dictionary: its `multi_modal_data` and `multi_modal_uuids`, which are read as its
    `mm_processor_kwargs` say.

    Raises:
        ParameterError: one has another form.
    """
    if not isinstance(prompt, Mapping):
        return []
    data, uuids = prompt.get(_DATA) or {}, prompt.get(_UUIDS) or {}
    for name, value in ((_DATA, data), (_UUIDS, uuids)):
        if not isinstance(value, Mapping) or not set(value) <= set(get_args(Modality)):
            raise ParameterError(f"{name} maps {', '.join(get_args(Modality))} to items.", param=name)
    overrides = Overrides.read(prompt.get(PROCESSOR_KWARGS))
    parts = [part for modality in dict.fromkeys((*data, *uuids)) for part in _parts(modality, data, uuids)]
    return [part._replace(overrides=overrides) for part in parts]


def _parts(modality: Modality, data: Mapping[str, Any], uuids: Mapping[str, Any]) -> list[MediaPart]:
    values, names = _items(modality, data.get(modality)), _as_list(uuids.get(modality))
    if values and names and len(values) != len(names):
        raise ParameterError(
            f"{_UUIDS} has {len(names)} names for {len(values)} items of type {modality}.", param=_UUIDS
        )
    values, names = values or [None] * len(names), names or [None] * len(values)
    parts = []
    for index, (value, name) in enumerate(zip(values, names, strict=True)):
        param = f"{_DATA}.{modality}[{index}]"
        source: str | Content | None = None if value is None else content_of(modality, value, param)
        if source is None and name is None:
            raise ParameterError(f"{param} is None, and has no uuid.", param=param)
        parts.append(MediaPart(modality, source, param, name))
    return parts


def _items(modality: Modality, value: Any) -> list[Any]:
    """One item, or those of a list."""
    is_one = (modality == "audio" and is_sound(value)) or (modality == "video" and is_video(value))
    if modality == "image" and getattr(value, "ndim", 0) == 3 and is_rows(value[0]):
        return list(value)
    return [value] if is_one else _as_list(value)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
