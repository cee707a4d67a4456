"""Towers for images, videos and sounds: the class's code makes the rows that replace the embeddings of placeholders.

An item's placeholders run through the class's code alone, up to its language model. What that would be given there is
caught: embeddings with the tower's rows in them, and features for its first layers.
"""

import contextlib
import inspect
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.core.wire.media import ROW_IDS, Array, MediaItem, Modality
from quire.executor.layers.context import ModelContext
from quire.executor.layers.media_arrays import tensor_of
from quire.executor.layers.step_context import StepContext
from quire.executor.models.base import MediaRows, MediaSupport
from quire.executor.models.transformers.absent_modules import idle_modules
from quire.executor.models.transformers.divided_items import DividedItems
from quire.executor.models.transformers.layer_modules import Embedding
from quire.executor.models.transformers.probe import Findings, runnable
from quire.executor.models.transformers.skeleton import takes
from quire.executor.models.transformers.tower_layers import TowerLayers

logger = get_logger(__name__)

_PIXELS: Mapping[Modality, tuple[str, ...]] = {
    "image": ("pixel_values", "image_pixel_values", "pixel_values_images"),
    "audio": ("input_features", "audio_input_features", "input_values"),
    "video": ("pixel_values_videos",),
}
"""Arguments of classes that are a tower's main input."""
_TYPES: Mapping[Modality, int] = {"image": 1, "video": 2, "audio": 3}
"""The library's numbers for the types of tokens; 0 is text."""

_TYPES_NAME = "mm_token_type_ids"
_DEEP, _DEEP_TOKENS = "deepstack_visual_embeds", "visual_pos_masks"
_LENGTHS = {"audio_seqlens": "audio_feature_lengths"}
"""Arguments of `get_rope_index` that the processor has under other names."""


class _Reached(Exception):
    """Ends a run of the class's code at its language model."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments


class Towers:
    """The towers of one class on one rank.

    Attributes:
        text: the language model that `backbone` calls.
        modules: all of their modules, an outer one before those inside of it.
        support: what they read.
        sees_prompt: a token of a prompt sees the whole prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backbone: nn.Module,
        text: nn.Module,
        context: ModelContext,
        modules: Container[nn.Module] = (),
    ) -> None:
        self._device = context.device
        self._dtype = context.dtype
        self._model = model
        self._backbone = backbone
        self._layer_embeddings = _layer_embeddings(text)
        self.text = text
        self.modules = dict.fromkeys(module for module in model.modules() if module in modules)
        self._layers = TowerLayers(model, backbone, context)
        self._division: DividedItems | None = None
        if context.group.size > 1 and not context.divides_towers:
            self._division = DividedItems(context.group, context.dtype, context.device)
        self._token_ids = _placeholder_ids(model)
        modalities = [each for each in _PIXELS if each in self._token_ids and takes_any(backbone, each)]
        seen, in_windows = _seen(model, backbone, text)
        sees = bool(seen[1, 2]), bool(in_windows[1, 2])
        self.support = MediaSupport(modalities, sees_both_ways=any(sees), in_windows=sees == (False, True))
        self.sees_prompt = bool(seen[0, 3])
        hands_on = takes(model, _TYPES_NAME) or not takes(backbone, _TYPES_NAME)  # what places follow from
        self._index = getattr(backbone, "get_rope_index", None) if hands_on else None
        self._num_axes = _num_axes(model)
        self._extra: Mapping[str, Any] = {}
        text.register_forward_pre_hook(self._add_features, with_kwargs=True)

    def replace_layers(self, context: ModelContext) -> None:
        """Puts our layers in place of those of towers that a dry run understands; `context` reads their weights."""
        code = self._layers.replace(context, self.modules)
        if code is not None:
            self.support = self.support._replace(activation_size=code.activation_size, num_deep=code.num_deep)

    def settle(self) -> None:
        """Sets the attention of towers; that of sequences has pages."""
        self._layers.settle(self.modules)

    def encode(self, items: Sequence[MediaItem]) -> list[MediaRows]:
        """Runs items through the class's code. Ranks divide the weights, or the items."""
        if self._division is None:
            return [self._encode(item) for item in items]
        embedding, modalities = self._model.get_input_embeddings(), sorted({item.modality for item in items})
        if not isinstance(embedding, Embedding):  # the decoder has its own
            return self._division.encode(items, self._encode)
        tokens = torch.tensor([self._token_ids[each] for each in modalities], device=self._device)
        rows = dict(zip(modalities, embedding(tokens), strict=True))  # looked up by all ranks together

        def encode(item: MediaItem) -> MediaRows:
            with embedding.alone(rows[item.modality]):
                return self._encode(item)

        return self._division.encode(items, encode)

    def _encode(self, item: MediaItem) -> MediaRows:
        """Makes the rows of one item: NaN, which fails its requests, where the class's code cannot read it."""
        try:
            return self._rows(item)
        except Exception as error:  # the code of a model may raise anything
            logger.error("%s cannot read an item of %d rows: %s", type(self._model).__name__, item.num_rows, error)
        finally:
            self._layers.attention.forget()
        size = self._model.config.get_text_config().hidden_size
        rows = torch.full((item.num_rows, size), torch.nan, dtype=self._dtype, device=self._device)
        deep = rows.expand(self.support.num_deep, -1, -1) if self.support.num_deep else None
        return MediaRows(rows, deep, 0 if self._layer_embeddings else None)

    def _rows(self, item: MediaItem) -> MediaRows:
        device, number = self._device, item.num_rows
        arguments = {name: _tensor(array, self._dtype, device) for name, array in _arrays([item]).items()}
        token_ids = arguments.pop(ROW_IDS, None)
        if token_ids is None:
            token_ids = torch.full((1, number), self._token_ids[item.modality], dtype=torch.int64, device=device)
        own = {name: value for name, value in arguments.items() if takes(self._backbone, name)}
        if takes(self._backbone, "attention_mask"):  # by which some count an item's tokens
            own["attention_mask"] = torch.ones_like(token_ids)
        if takes(self._backbone, "position_ids"):
            own["position_ids"] = torch.arange(number, device=device).unsqueeze(0)
        with _noted_ids(self._layer_embeddings) as layer_ids:
            given = reach(self._backbone, self.text, {"input_ids": token_ids, **own})
        rows = given["inputs_embeds"][0]
        deep = given.get(_DEEP)
        return MediaRows(
            rows, None if deep is None else torch.stack(list(deep)).to(rows.dtype), layer_ids[0] if layer_ids else None
        )

    def positions(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Tensor | None:
        """Computes `ReadsMedia.media_positions` by the class's code."""
        index = self._index
        if index is None:
            return None
        types = torch.zeros(1, len(token_ids), dtype=torch.int64)
        for item in items:
            for start, end in item.runs:
                types[0, start:end] = _TYPES[item.modality]
        known = inspect.signature(index).parameters
        cpu = torch.device("cpu")
        joined = _arrays(items, [_LENGTHS.get(name, name) for name in known])
        given = {_TYPES_NAME: types, "attention_mask": torch.ones_like(types)}
        given |= {name: _tensor(array, torch.float32, cpu) for name, array in joined.items()}
        own = {name: given[key] for name in known if (key := _LENGTHS.get(name, name)) in given}
        positions, _ = index(input_ids=torch.tensor([token_ids]), **own)
        return positions[-self._num_axes :, 0].to(torch.int64)

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


def _num_axes(model: PreTrainedModel) -> int:
    """Returns the number of axes of places that tokens are rotated by: time, height and width, or what the text model's
    configuration says."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return max(3, len(rope.get("mrope_section") or ()))


def _layer_embeddings(text: nn.Module) -> list[nn.Module]:
    """Finds the embeddings of a language model beside that of its tokens: those that its layers have of tokens."""
    own = text.get_input_embeddings() if isinstance(text, PreTrainedModel) else None
    return [module for module in text.modules() if isinstance(module, nn.Embedding) and module is not own]


@contextlib.contextmanager
def _noted_ids(embeddings: Iterable[nn.Module]) -> Iterator[list[int]]:
    """Collects the first ids that embeddings are asked for, while the context lasts."""
    found: list[int] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: found.append(int(args[0].flatten()[0])))
        for module in embeddings
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def reach(backbone: nn.Module, text: nn.Module, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Runs `backbone` up to the call of `text`, and returns the arguments of that call."""

    def stop(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        raise _Reached({"inputs_embeds": args[0], **kwargs} if args else kwargs)

    hook = text.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        backbone(**arguments)
    except _Reached as reached:
        return reached.arguments
    finally:
        hook.remove()
    raise ModelLoadError(f"{type(backbone).__name__} computes no embeddings for a language model")


def find_text(model: PreTrainedModel, backbone: nn.Module, findings: Findings) -> nn.Module:
    """Finds the language model inside of `backbone`: the part that contains all attention and takes embeddings. If
    `backbone` is the language model itself, this is the first of its layers.

    Raises:
        ModelLoadError: there is neither.
    """
    attending = {call.module for call in findings.calls}
    for child in backbone.children():
        if attending <= set(child.modules()) and child in findings.called and takes(child, "inputs_embeds"):
            return child
    first = next((next(module.children()) for module in backbone.modules() if _is_stack(module, findings)), None)
    if first is None or not _takes_embeddings_unchanged(model, backbone, first):
        raise ModelLoadError("no part of it is a language model that takes embeddings")
    return first


def _is_stack(module: nn.Module, findings: Findings) -> bool:
    """Returns True for the list of a model's layers."""
    attending = {call.module for call in findings.calls[:1]}
    return isinstance(module, nn.ModuleList) and len(module) > 0 and attending < {*module[0].modules()}


def _takes_embeddings_unchanged(model: PreTrainedModel, backbone: nn.Module, first: nn.Module) -> bool:
    """Returns True if embeddings that `backbone` is given are the input of its first layer."""
    embedding: Any = model.get_input_embeddings()
    embeds = torch.arange(2 * embedding.weight.shape[1]).view(1, 2, -1).mul(0.7).sin()
    with runnable(model, Findings(), {}):
        given = reach(backbone, first, {"inputs_embeds": embeds.to(model.dtype)})["inputs_embeds"]
    return given.shape == embeds.shape and torch.equal(given, embeds.to(model.dtype))


def build_towers(
    model: PreTrainedModel,
    generator: PreTrainedModel,
    findings: Findings,
    context: ModelContext,
    *,
    is_flat: bool = True,
) -> Towers | None:
    """Returns the towers of a class, which runs the tokens of several requests as one sequence if it `is_flat`.

    None, with a line in the log, if there are none, or their code does not fit.

    Args:
        generator: the part of `model` that `findings` are of, see `text_part`.
    """
    assert findings.backbone is not None
    try:
        if generator is model:
            backbone, text = findings.backbone, find_text(model, findings.backbone, findings)
        else:
            backbone, text = model, generator
        idle = [*idle_modules(model, findings.called), *_layers_beside(backbone, text, findings.called)]
        modules = {part for module in idle for part in module.modules() if part is not model}
        towers = Towers(model, backbone, text, context, modules)
        if not towers.support.modalities or not towers.modules:
            raise ModelLoadError("it has no tower for images or sounds")
        if towers.support.sees_both_ways and not is_flat:
            raise ModelLoadError("it runs row by row, and the tokens of an image see each other")
    except Exception as error:  # the code of a model may raise anything
        logger.info("%s reads text alone: %s", type(model).__name__, error)
        return None
    return towers


def _layers_beside(backbone: nn.Module, text: nn.Module, called: Container[nn.Module]) -> list[nn.Module]:
    """Returns the layers beside the language model that a dry run on text never called: they read pixels."""
    children = list(backbone.children())
    return [child for child in children if child not in called] if text in children else []


def _placeholder_ids(model: PreTrainedModel) -> dict[Modality, int]:
    """Maps modalities to the tokens that stand for their rows."""
    found: dict[Modality, int] = {}
    configs = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]
    for modality in _PIXELS:
        for name in (f"{modality}_token_id", f"{modality}_token_index"):
            for config in configs:
                value = getattr(config, name, None)
                if isinstance(value, int):
                    found.setdefault(modality, value)
    return found


def _seen(model: PreTrainedModel, backbone: nn.Module, text: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns the tokens that each of five tokens sees, [5, 5] bool, in layers without and with a window: text, two
    tokens of an image, text, and one of an image. A class that is not told which these are has the usual masks.

    Raises:
        ModelLoadError: a token of an image sees those of a later image.
    """
    name = next((each for each in ("token_type_ids", _TYPES_NAME) if takes(backbone, each)), None)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    if name is None:
        return causal, causal
    types = torch.tensor([[0, 1, 1, 0, 1]])
    arguments = {
        "input_ids": torch.full_like(types, 5), name: types, "position_ids": torch.arange(5).unsqueeze(0)
    }  # fmt: skip
    with runnable(model, Findings(), {}, is_flat=False):
        given = reach(backbone, text, arguments).get("attention_mask")
    masks = given if isinstance(given, Mapping) else {"full_attention": given}
    found = {
        kind: mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
        for kind, mask in masks.items()
        if isinstance(mask, Tensor) and mask.dim() == 4
    }
    if any(seen[1, 4] for seen in found.values()):
        raise ModelLoadError("the tokens of an image see those of later images")
    seen = found.get("full_attention", causal)
    return seen, found.get("sliding_attention", seen)


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
    values = tensor_of(array)
    return values.to(device, dtype) if values.is_floating_point() else values.to(device)
