"""Tiny random checkpoints of any model of Transformers that reads images beside text, and how ours differ from them.

Each image is given as the arrays that the class's tower reads: the class tells their forms by the names of its
arguments.
"""

import inspect
import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from quire.core.config.model import ModelConfig, ModelImplementation
from quire.core.errors import ModelLoadError
from quire.core.wire.media import Array, MediaItem
from quire.executor.models.base import ReadsMedia
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.media_steps import MediaPrompt
from tests.executor.models import tiny_models
from tests.executor.models.coverage import Agreement, difference
from tests.executor.models.tiny_models import VOCAB_SIZE
from tests.executor.paged_driver import load_model

MODEL_TYPES = sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "phi4_multimodal"})
"""All such models. Those of speech alone are not among them."""

_TOWER_SIZES: dict[tuple[str, ...], Any] = {
    ("hidden_size", "embed_dim", "d_model", "width", "dim", "encoder_hidden_size", "mm_hidden_size"): 32,
    ("num_hidden_layers", "depth", "num_layers", "layers", "encoder_layers", "num_local_layers"): 2,
    ("num_attention_heads", "num_heads", "attention_heads", "num_key_value_heads", "num_head_channels"): 2,
    ("head_dim",): 16,
    ("intermediate_size", "mlp_dim"): 48,
    ("out_hidden_size", "text_hidden_size", "projection_dim", "output_dim", "projector_hidden_size"): 64,
    ("num_position_embeddings", "max_position_embeddings"): 64,
    ("pos_emb_height", "pos_emb_width"): 8,
    ("fullatt_block_indexes", "global_attn_indexes"): [1],
    ("deepstack_visual_indexes",): [0, 1],
    ("vocab_size",): VOCAB_SIZE,
}  # fmt: skip
_OUTER_SIZES = {
    "hidden_size": 64, "vocab_size": VOCAB_SIZE, "projector_hidden_size": 64, "projection_dim": 64,
    "mm_hidden_size": 32, "vision_feature_layer": -1, "mm_tokens_per_image": 4, "insert_layer_id": 0,
}  # fmt: skip
_TEXTS = ("text_config", "language_config", "llm_config", "decoder")

_TOKENS = re.compile(r"((image|img|vision|video|audio|speech).*|boi|eoi|boa|eoa)_(token|patch)_(id|index)")
_FIRST_TOKEN = 300
"""The tokens for images and around them; the texts of a prompt have none of them."""


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}


SPECIAL: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {"16": 4}},
    "gemma4": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64,
        },
        "text_config": {"use_bidirectional_attention": "vision"},
    },
    "llama4": {
        "vision_config": {
            "intermediate_size": 128, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
        },
    },
    "qwen2_vl": {"vision_config": {"hidden_size": 64}, "text_config": {"rope_parameters": _rope(2, 3, 3)}},
    "mistral_large4": {"text_config": {"num_key_value_heads": 4}},
    **{
        name: {"text_config": {"rope_parameters": _rope(2, 3, 3)}}
        for name in ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl")
    },
    "kimi_k25": {"projection_hidden_size": 32},
    "glm4v_moe": {"text_config": {"rope_parameters": {**_rope(2, 1, 1), "partial_rotary_factor": 0.5}}},
    "glm5_next": {"text_config": {"num_key_value_heads": 4}},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [48, 48]}},
    "ovis2": {"visual_indicator_token_ids": [310, 311, 312, 313, 314]},
    "phi4_multimodal": {"vision_config": {"crop_size": 56}},
}  # fmt: skip
"""By model type: what does not follow from the sizes above, by the names of inner configs."""

_GRIDS = ((4, 8), (8, 4), (4, 4))
"""Height and width of the images, in patches."""
_TURNED = ((6, 12), (12, 6), (6, 12))
"""The same where all images have as many patches."""
_TEXT_SIZES = (12, 5, 4, 20)
"""Tokens before, between and after the images."""
_TYPED_BY_OUTPUT = ("paligemma",)
"""Classes that are told which tokens are no prompt."""
_TAIL = 12
"""Tokens at the end that come one by one."""

Arrays = dict[str, Tensor]

MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined] # Llama 4's class reads it


def architecture_of(model_type: str) -> str:
    """The library's class that generates text."""
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type, "Phi4MultimodalForCausalLM")


def tiny_config(model_type: str) -> PretrainedConfig:
    """A config of few small layers."""
    kind = CONFIG_MAPPING[model_type]
    values = _merged(_shrunk(kind(), ""), SPECIAL.get(model_type, {}))
    size = values.get("vision_config", {}).get("image_size")
    if values.get("image_grid_pinpoints"):
        values["image_grid_pinpoints"] = [[size, 2 * size], [2 * size, size]]
    _name_tokens(values, {"image_token_id": _FIRST_TOKEN})
    return kind(**values)


def _name_tokens(values: dict[str, Any], known: dict[str, int]) -> None:
    """Gives the tokens for images, and around them, ids within the vocabulary: in all configs the same."""
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("_config"):
            _name_tokens(value, known)
        elif _TOKENS.fullmatch(name) and isinstance(value, int | None):
            same = name.replace("_index", "_id")
            values[name] = known.setdefault(same, _FIRST_TOKEN + len(known))


def _shrunk(config: PretrainedConfig, name: str) -> dict[str, Any]:
    """The fields of a config with other sizes, and of those in it."""
    if name in _TEXTS and config.model_type in tiny_models.MODEL_TYPES:
        inner = tiny_models.tiny_config(config.model_type).to_dict()
    else:
        inner = {field: value for field, value in config.to_dict().items() if not _is_by_layer(config, value)}
        inner.pop("transformers_version", None)
        sizes = tiny_models.SIZES if name in _TEXTS else _TOWER_SIZES
        has_parts = any(isinstance(getattr(config, field, None), PretrainedConfig) for field in config.sub_configs)
        if not name and not has_parts:
            sizes = tiny_models.SIZES
        if name or not has_parts:
            inner |= {field: size for fields, size in sizes.items() for field in fields if _is_given(inner, field)}
        else:
            inner |= {field: size for field, size in _OUTER_SIZES.items() if _is_given(inner, field)}
        if _is_given(inner, "image_size") and isinstance(patch := inner.get("patch_size"), int):
            size = 4 * patch
            inner["image_size"] = [size, size] if isinstance(inner["image_size"], list | tuple) else size
    for field in config.sub_configs:
        part = getattr(config, field, None)
        if isinstance(part, PretrainedConfig):
            inner[field] = {"model_type": part.model_type, **_shrunk(part, field)}
    _fit_sections(inner)
    return inner


def _is_by_layer(config: PretrainedConfig, value: Any) -> bool:
    """Returns True for a list with a value for each layer."""
    count = getattr(config, "num_hidden_layers", getattr(config, "depth", None))
    return isinstance(value, list | tuple) and len(value) == count and count > 3


def _is_given(values: Mapping[str, Any], name: str) -> bool:
    return values.get(name) is not None


def _fit_sections(values: dict[str, Any]) -> None:
    """Makes the sections of rotations in time, height and width as small as the heads are."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and each.get("mrope_section"):
            share = each.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1
            size = int((values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]) * share) // 2
            most = sum(each["mrope_section"])
            rest = [max(1, part * size // most) for part in each["mrope_section"][1:]]
            each["mrope_section"] = [size - sum(rest), *rest]


def _merged(values: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: _merged(values[name], own) for name, own in others.items() if isinstance(values.get(name), dict)}
    return {**values, **others, **inner}


def write_checkpoint(folder: Path, model_type: str) -> PreTrainedModel:
    """Writes a checkpoint of random weights; returns the library's model of it."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model: PreTrainedModel = getattr(transformers, architecture_of(model_type))(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.config.architectures = [architecture_of(model_type)]
    model.save_pretrained(folder)
    return model.eval().float()


class Prompt(NamedTuple):
    """A prompt with images.

    Attributes:
        inputs: what the library's model is given.
    """

    token_ids: list[int]
    items: list[MediaItem]
    inputs: dict[str, Any]


def make_prompt(reference: PreTrainedModel) -> Prompt:
    """A prompt with images of several sizes, if the class takes them.

    Raises:
        ValueError: the class's arguments tell no form of images.
    """
    images = _images(reference)
    numbers = [_num_rows(reference, arrays) for arrays in images]
    marks = _marks(reference)
    generator = torch.Generator().manual_seed(1)
    token_ids: list[int] = []
    types: list[int] = []
    items = []
    for index, size in enumerate(_TEXT_SIZES):
        token_ids += torch.randint(3, _FIRST_TOKEN, (size,), generator=generator).tolist()
        if index < len(images):
            token_ids += marks[:1]
            start = len(token_ids)
            token_ids += [reference.config.image_token_id] * numbers[index]
            items.append(_item(images[index], start, len(token_ids)))
            token_ids += marks[1:]
        types += [0] * (len(token_ids) - len(types))
    for item in items:
        types[item.start : item.end] = [1] * item.num_rows
    inputs: dict[str, Any] = {"input_ids": torch.tensor([token_ids]), **_joined(images)}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if any(name in inspect.signature(each.forward).parameters for each in (reference, base_of(reference))):
            inputs[name] = torch.tensor([types])
    if reference.config.model_type in _TYPED_BY_OUTPUT:
        inputs["token_type_ids"] = torch.tensor([[0] * (len(token_ids) - _TAIL) + [1] * _TAIL])
    return Prompt(token_ids, items, inputs)


def base_of(reference: PreTrainedModel) -> Any:
    """The part of the library's model that has the tower."""
    base = getattr(reference, "model", reference)
    return base if hasattr(base, "get_image_features") else reference


def _marks(reference: PreTrainedModel) -> list[int]:
    """The tokens before and after an image."""
    pairs = [("vision_start_token_id", "vision_end_token_id"), ("image_start_token_id", "image_end_token_id")]
    for pair in pairs:
        if all(isinstance(getattr(reference.config, name, None), int) for name in pair):
            return [getattr(reference.config, name) for name in pair]
    return []


def _images(reference: PreTrainedModel) -> list[Arrays]:
    """The arrays of each image, in the first form that the class takes."""
    for forms in _forms(reference):
        try:
            for arrays in forms:
                _num_rows(reference, arrays)
        except Exception:  # whatever the library raises for arrays of another form
            continue
        return forms
    raise ValueError("its arguments tell no form of images")


def _num_rows(reference: PreTrainedModel, arrays: Arrays) -> int:
    with torch.inference_mode():
        features = base_of(reference).get_image_features(**arrays, return_dict=True)
    rows = getattr(features, "pooler_output", features)
    return _count_rows(features.last_hidden_state if rows is None else rows)


def _count_rows(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.numel() // features.shape[-1]
    return sum(_count_rows(each) for each in features)


def _forms(reference: PreTrainedModel) -> Iterator[list[Arrays]]:
    """The forms of images that the arguments of a class may mean."""
    base = base_of(reference)
    vision = getattr(reference.config, "vision_config", reference.config)
    patch, channels = _first(vision, "patch_size", default=14), _first(vision, "in_channels", "num_channels", default=3)
    names = {*inspect.signature(base.get_image_features).parameters}
    generator = torch.Generator().manual_seed(2)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if "image_grid_thw" in names:
        times = _first(vision, "temporal_patch_size", "patch_temporal", default=1)
        for shape in ((channels * times * patch**2,), (channels, patch, patch), (channels * patch**2,)):
            merged = {"image_merge_sizes": torch.tensor([2])} if "image_merge_sizes" in names else {}
            yield [
                {"pixel_values": noise(h * w, *shape), "image_grid_thw": torch.tensor([[1, h, w]]), **merged}
                for h, w in _GRIDS
            ]
        return
    flat = channels * patch**2
    if "image_grid_hw" in names:
        yield [{"pixel_values": noise(h * w, flat), "image_grid_hw": torch.tensor([[h, w]])} for h, w in _GRIDS]
        return
    if "spatial_shapes" in names:
        yield [
            {
                "pixel_values": noise(1, h * w, flat),
                "spatial_shapes": torch.tensor([[h, w]]),
                "pixel_attention_mask": torch.ones(1, h * w, dtype=torch.int64),
            }
            for h, w in _TURNED
        ]
        return
    if "image_position_ids" in names:
        side = _first(vision, "model_patch_size", default=patch)
        for each in (flat, channels * side**2):
            yield [
                {
                    "pixel_values": noise(1, h * w, each),
                    "image_position_ids": torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)[None],
                }
                for h, w in _TURNED
            ]
        return
    if "target_sizes" in names:
        yield [
            {
                "pixel_values": noise(1, channels, patch, h * w * patch),
                "target_sizes": torch.tensor([[h, w]], dtype=torch.int32),
            }
            for h, w in _GRIDS
        ]
        return
    size = _first(vision, "image_size", default=4 * patch)
    extras: list[Arrays] = [{}]
    if "image_sizes" in names:
        extras += [{"image_sizes": torch.tensor([[size, width]])} for width in (size, 2 * size)]
    tiles = (1,), (1, 3), (1, 5), (3,)
    for first, extra in itertools.product(tiles, extras):
        arrays = [{"pixel_values": noise(*first, channels, size, size), **extra} for _ in _GRIDS]
        if "pixel_attention_mask" in names:
            arrays = [
                {**each, "pixel_attention_mask": torch.ones(*first, size, size, dtype=torch.bool)} for each in arrays
            ]
        yield arrays


def _first(config: Any, *names: str, default: int) -> int:
    value = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)
    return value[0] if isinstance(value, list | tuple) else value


def _item(arrays: Arrays, start: int, end: int) -> MediaItem:
    made = {
        name: Array(str(value.numpy().dtype), tuple(value.shape), value.numpy().tobytes())
        for name, value in arrays.items()
    }
    return MediaItem("image", str(start).encode(), [(start, end)], arrays=made)


def _joined(images: list[Arrays]) -> Arrays:
    is_strip = "target_sizes" in images[0]  # the patches of all images side by side
    return {
        name: torch.cat([arrays[name] for arrays in images], dim=-1 if is_strip and name == "pixel_values" else 0)
        for name in images[0]
    }


def logprobs(reference: PreTrainedModel, prompt: Prompt) -> Tensor:
    """The library's log-probabilities after each token: [num_tokens, vocab_size]."""
    with torch.inference_mode():
        return reference(**prompt.inputs).logits[0].log_softmax(-1)


class _Reasons(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def measure(folder: Path, prompt: Prompt, expected: Tensor, implementation: ModelImplementation) -> Agreement:
    """Feeds a prompt with images in chunks of odd sizes, which end inside of images where a model takes that, and its
    last tokens one by one.

    Raises:
        ModelLoadError: the implementation does not take the checkpoint, or reads no images.
    """
    spec = read_model_spec(folder, ModelConfig(model=str(folder), model_impl=implementation, dtype="float32"))
    reasons, log = _Reasons(), logging.getLogger("quire")
    log.addHandler(reasons)
    try:
        model = load_model(spec, reads_media=True)
    finally:
        log.removeHandler(reasons)
    if not isinstance(model, ReadsMedia) or model.media is None or "image" not in model.media.modalities:
        raise ModelLoadError(next((text for text in reasons.texts if "text alone" in text), "it reads text alone"))
    last = len(prompt.token_ids) - _TAIL
    cuts = [*(cut for cut in (9, 20, 31, 50) if cut < last), *range(last, len(prompt.token_ids))]
    got = MediaPrompt(model, prompt.token_ids, prompt.items, _TAIL).logits(cuts)
    likeliest = got[last:, : expected.shape[1]].argmax(-1) == expected[last:].argmax(-1)
    return Agreement(difference(got, expected), bool(likeliest.all()))
