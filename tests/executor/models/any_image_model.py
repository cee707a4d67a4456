"""Tiny random checkpoints of any model of Transformers that reads images beside text, and how ours differ from them.

Each image is given as the arrays that the class's tower reads: the class tells their forms by the names of its
arguments.
"""

import inspect
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from quire.core.config.model import ModelConfig, ModelImplementation
from quire.core.errors import ModelLoadError
from quire.core.wire.media import Array, MediaItem
from quire.executor.models.base import ReadsMedia
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.media_steps import MediaPrompt
from tests.executor.models.coverage import Agreement, difference
from tests.executor.models.image_configs import FIRST_TOKEN, tiny_config
from tests.executor.models.image_forms import Arrays, base_of, image_token, images_for, num_rows
from tests.executor.paged_driver import load_model

MODEL_TYPES = sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "phi4_multimodal"})
"""All such models. Those of speech alone are not among them."""

_ENCODES = "an encoder reads the image, with text beside it or by code of its own, and the decoder attends to it"
_ATTENDS = "layers attend to the images beside the tokens, and a mask says which tokens see which image"
_WITHOUT_TOKEN = "a mask beside the tokens, and no token, says where the rows of an image are"
OTHER_KINDS = {
    **dict.fromkeys(("blip", "florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop"), _ENCODES),
    **dict.fromkeys(("idefics", "mllama"), _ATTENDS),
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), _WITHOUT_TOKEN),
    "diffusion_gemma": "writes blocks of tokens by diffusion, and not one token after the other",
    "evolla": "reads the structures of proteins, and no images",
    "git": "the rows of an image stand before a prompt, without tokens in their places",
    "instructblipvideo": "reads videos alone, which are not tried here",
    "mistral4": "the class has no tower",
    "pi0": "makes the movements of a robot, and no text",
    "shieldgemma2": "a classifier, whose class and tensors have other names than Gemma 3's",
}
"""Models of this list that are of another kind: model type → what they are."""

_TEXT_SIZES = (12, 5, 4, 20)
"""Tokens before, between and after the images."""
_TYPED_BY_OUTPUT = ("paligemma",)
"""Classes that are told which tokens are no prompt."""
_TAIL = 12
"""Tokens at the end that come one by one."""

MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined] # Llama 4's class reads it


def architecture_of(model_type: str) -> str:
    """The library's class that generates text."""
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type, "Phi4MultimodalForCausalLM")


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
    images = images_for(reference)
    numbers = [num_rows(reference, arrays) for arrays in images]
    marks = _marks(reference)
    generator = torch.Generator().manual_seed(1)
    token_ids: list[int] = []
    types: list[int] = []
    items = []
    for index, size in enumerate(_TEXT_SIZES):
        token_ids += torch.randint(3, FIRST_TOKEN, (size,), generator=generator).tolist()
        if index < len(images):
            token_ids += marks[:1]
            start = len(token_ids)
            token_ids += [image_token(reference)] * numbers[index]
            items.append(_item(images[index], start, len(token_ids)))
            token_ids += marks[1:]
        types += [0] * (len(token_ids) - len(types))
    for item in items:
        types[item.start : item.end] = [1] * item.num_rows
    inputs: dict[str, Any] = {"input_ids": torch.tensor([token_ids]), **_joined(images)}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if any(name in inspect.signature(each.forward).parameters for each in (reference, base_of(reference))):
            inputs[name] = torch.tensor([types])
    if "attention_mask" in inspect.signature(getattr(base_of(reference), "get_rope_index", make_prompt)).parameters:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if reference.config.model_type in _TYPED_BY_OUTPUT:
        inputs["token_type_ids"] = torch.tensor([[0] * (len(token_ids) - _TAIL) + [1] * _TAIL])
    return Prompt(token_ids, items, inputs)


def _marks(reference: PreTrainedModel) -> list[int]:
    """The tokens before and after an image."""
    pairs = [("vision_start_token_id", "vision_end_token_id"), ("image_start_token_id", "image_end_token_id")]
    for pair in pairs:
        if all(isinstance(getattr(reference.config, name, None), int) for name in pair):
            return [getattr(reference.config, name) for name in pair]
    return []


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
    log.setLevel(logging.INFO)
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
