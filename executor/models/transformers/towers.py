"""Towers for images and sounds: the class's own code makes the rows that replace the embeddings of placeholders.

An item's placeholders run through the class's code alone, up to its language model. What that would be given there is
caught: embeddings with the tower's rows in them, and features for its first layers.
"""

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.core.wire.media import Array, MediaItem, Modality
from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import StepContext
from quire.executor.models.base import MediaRows, MediaSupport
from quire.executor.models.transformers.absent_modules import idle_modules
from quire.executor.models.transformers.probe import Findings, runnable, set_attention
from quire.executor.models.transformers.skeleton import takes

logger = get_logger(__name__)

_PIXELS: Mapping[Modality, tuple[str, ...]] = {
    "image": ("pixel_values", "image_pixel_values", "pixel_values_images"),
    "audio": ("input_features", "audio_input_features"),
    "video": ("pixel_values_videos",),
}
"""Arguments of classes that are a tower's main input."""
_TYPES: Mapping[Modality, int] = {"image": 1, "video": 2, "audio": 3}
"""The library's numbers for the types of tokens; 0 is text."""

_DEEP, _DEEP_TOKENS = "deepstack_visual_embeds", "visual_pos_masks"
_SERVED: tuple[Modality, ...] = ("image", "audio")
_LENGTHS = {"audio_seqlens": "audio_feature_lengths"}
"""Arguments of `get_rope_index` that the processor has under other names."""


class _Reached(Exception):
    """Ends a run of the class's code at its language model."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments


class Towers:
    """The towers of one class on one rank; each rank has them whole.

    Attributes:
        modules: all of their modules.
        support: what they read.
    """

    def __init__(
        self, model: PreTrainedModel, backbone: nn.Module, text: nn.Module, findings: Findings, context: ModelContext
    ) -> None:
        self._device = context.device
        self._dtype = context.dtype
        self._backbone = backbone
        self._text = text
        self.modules = {
            part for module in idle_modules(model, findings.called) for part in module.modules() if part is not model
        }
        self._token_ids = _placeholder_ids(model)
        modalities = [each for each in _SERVED if each in self._token_ids and takes_any(backbone, each)]
        self.support = MediaSupport(modalities, sees_both_ways=_sees_both_ways(model, backbone, text))
        self._extra: Mapping[str, Any] = {}
        text.register_forward_pre_hook(self._add_features, with_kwargs=True)

    def settle(self) -> None:
        """Lets the towers compute attention as the library does; ours has pages for sequences alone."""
        for module in self.modules:
            if isinstance(module, PreTrainedModel):
                set_attention(module, "sdpa" if module._supports_sdpa else "eager")

    def encode(self, item: MediaItem) -> MediaRows:
        """Runs one item through the class's code."""
        device, number = self._device, item.num_rows
        token_ids = torch.full((1, number), self._token_ids[item.modality], dtype=torch.int64, device=device)
        arguments = {name: _tensor(array, self._dtype, device) for name, array in _arrays([item]).items()}
        own = {name: value for name, value in arguments.items() if takes(self._backbone, name)}
        if takes(self._backbone, "attention_mask"):  # by which some count an item's tokens
            own["attention_mask"] = torch.ones_like(token_ids)
        if takes(self._backbone, "position_ids"):
            own["position_ids"] = torch.arange(number, device=device).unsqueeze(0)
        given = reach(self._backbone, self._text, {"input_ids": token_ids, **own})
        rows = given["inputs_embeds"][0]
        deep = given.get(_DEEP)
        return MediaRows(rows, None if deep is None else torch.stack(list(deep)).to(rows.dtype))

    def positions(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Tensor | None:
        """Computes `ReadsMedia.media_positions` by the class's code."""
        index = getattr(self._backbone, "get_rope_index", None)
        if index is None:
            return None
        types = torch.zeros(1, len(token_ids), dtype=torch.int64)
        for item in items:
            for start, end in item.runs:
                types[0, start:end] = _TYPES[item.modality]
        known = inspect.signature(index).parameters
        cpu = torch.device("cpu")
        joined = _arrays(items, [_LENGTHS.get(name, name) for name in known])
        given = {"mm_token_type_ids": types, "attention_mask": torch.ones_like(types)}
        given |= {name: _tensor(array, torch.float32, cpu) for name, array in joined.items()}
        own = {name: given[key] for name in known if (key := _LENGTHS.get(name, name)) in given}
        positions, _ = index(input_ids=torch.tensor([token_ids]), **own)
        return positions[-3:, 0].to(torch.int64)

    @contextlib.contextmanager
    def features(self, step: StepContext) -> Iterator[None]:
        """Gives the language model the features of a step's images for its first layers, while the context lasts."""
        embeds = step.input_embeds
        if embeds is None or embeds.deep is None:
            yield
            return
        order = embeds.places.argsort()
        is_image = torch.zeros(1, len(step.positions), dtype=torch.bool, device=embeds.rows.device)
        is_image[0, embeds.places] = True
        self._extra = {_DEEP_TOKENS: is_image, _DEEP: [layer[order] for layer in embeds.deep]}
        try:
            yield
        finally:
            self._extra = {}

    def _add_features(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **self._extra}


def takes_any(module: nn.Module, modality: Modality) -> bool:
    """Returns True if a module's `forward` takes items of a kind."""
    return any(takes(module, name) for name in _PIXELS[modality])


def reach(backbone: nn.Module, text: nn.Module, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Runs `backbone` up to the call of `text`, and returns the arguments of that call."""

    def stop(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        raise _Reached(kwargs)

    hook = text.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        backbone(**arguments)
    except _Reached as reached:
        return reached.arguments
    finally:
        hook.remove()
    raise ModelLoadError(f"{type(backbone).__name__} computes no embeddings for a language model")


def find_text(backbone: nn.Module, findings: Findings) -> nn.Module | None:
    """Finds the language model inside of `backbone`: the part that contains all attention and takes embeddings."""
    attending = {call.module for call in findings.calls}
    for child in backbone.children():
        if attending <= set(child.modules()) and child in findings.called and takes(child, "inputs_embeds"):
            return child
    return None


def build_towers(model: PreTrainedModel, findings: Findings, context: ModelContext) -> Towers | None:
    """Returns the towers of a class that runs the tokens of several requests as one sequence.

    None, with a line in the log, if there are none, or their code does not fit.
    """
    assert findings.backbone is not None
    try:
        text = find_text(findings.backbone, findings)
        if text is None:
            raise ModelLoadError("no part of it is a language model that takes embeddings")
        towers = Towers(model, findings.backbone, text, findings, context)
        if not towers.support.modalities or not towers.modules:
            raise ModelLoadError("it has no tower for images or sounds")
    except Exception as error:  # the code of a model may raise anything
        logger.info("%s reads text alone: %s", type(model).__name__, error)
        return None
    return towers


def _placeholder_ids(model: PreTrainedModel) -> dict[Modality, int]:
    """Maps modalities to the tokens that stand for their rows."""
    found: dict[Modality, int] = {}
    for modality in _PIXELS:
        for name in (f"{modality}_token_id", f"{modality}_token_index"):
            value = getattr(model.config, name, None)
            if isinstance(value, int):
                found.setdefault(modality, value)
    return found


def _sees_both_ways(model: PreTrainedModel, backbone: nn.Module, text: nn.Module) -> bool:
    """Returns True if the class lets the tokens of an image see each other, once it is told which tokens these are."""
    name = next((each for each in ("token_type_ids", "mm_token_type_ids") if takes(backbone, each)), None)
    if name is None:
        return False
    types = torch.tensor([[0, 1, 1, 1, 0]])
    arguments = {
        "input_ids": torch.full_like(types, 5), name: types, "position_ids": torch.arange(5).unsqueeze(0)
    }  # fmt: skip
    with runnable(model, Findings(), {}, is_flat=False):
        mask = reach(backbone, text, arguments).get("attention_mask")
    if isinstance(mask, Mapping):
        mask = next(iter(mask.values()))
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return False
    seen = mask[0, 0, 1, 3]
    return bool(seen) if mask.dtype == torch.bool else seen.item() == 0


def _arrays(items: Sequence[MediaItem], names: Collection[str] | None = None) -> dict[str, Array]:
    """Joins the arrays of items, by name: all, or those of `names`."""
    found: dict[str, Array] = {}
    for item in items:
        for name, array in (item.facts | item.arrays).items():
            if names is not None and name not in names:
                continue
            before = found.get(name)
            if before is not None:
                shape = (before.shape[0] + array.shape[0], *array.shape[1:])
                array = Array(array.dtype, shape, before.data + array.data)
            found[name] = array
    return found


def _tensor(array: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.from_numpy(np.frombuffer(array.data, array.dtype).reshape(array.shape).copy())
    return values.to(device, dtype) if values.is_floating_point() else values.to(device)
