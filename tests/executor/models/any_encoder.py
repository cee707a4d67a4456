"""Tiny random checkpoints of any encoder that Transformers has, and how ours differ from the library's."""

import contextlib
import inspect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from quire.core.config.model import ModelConfig, ModelImplementation
from quire.executor.models.base import Model, StepContext
from quire.executor.models.registry import build_model
from quire.frontend.checkpoint.encoders import ENCODER_TYPES
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.frontend.launch.pooling import resolve_pooling
from tests.executor.models.tiny_models import SIZES, VOCAB_SIZE
from tests.executor.paged_driver import model_context
from tests.executor.pretend_device import DEVICE

LENGTHS = (40, 1, 7, 90, 2)
PROMPTS = [[(37 * place * place + 11 * place + size) % 311 + 5 for place in range(size)] for size in LENGTHS]

_OF_SEQUENCES, _OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"
_HEADS = (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
_OTHER_BASES = {
    "longt5": "LongT5EncoderModel", "mt5": "MT5EncoderModel", "t5": "T5EncoderModel", "t5gemma": "T5GemmaEncoderModel",
    "switch_transformers": "SwitchTransformersEncoderModel", "umt5": "UMT5EncoderModel",
    "siglip_text_model": "SiglipTextModel", "splinter": "SplinterModel", "dpr": "DPRQuestionEncoder",
    "t5gemma2_encoder": "T5Gemma2Encoder",
}  # fmt: skip
"""The classes of encoders that no mapping of the library has under the type of their configuration."""

SPECIAL: dict[str, dict[str, Any]] = {
    "canine": {"num_hash_buckets": 64, "local_transformer_stride": 16, "downsampling_rate": 4},
    "dpr": {"projection_dim": 0},
    "esm": {
        "position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": True, "vocab_size": VOCAB_SIZE,
        "pad_token_id": 1,
    },
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [2, 2], "d_inner": 96, "d_head": 16, "num_decoder_layers": 1},
    "lilt": {"hidden_size": 96},
    "longformer": {"attention_window": [8, 8, 8, 8]},
    "reformer": {"attn_layers": ["local", "lsh"] * 2},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}  # fmt: skip

MODEL_TYPES = sorted(
    name
    for name in {*ENCODER_TYPES, *_OTHER_BASES}
    if name in CONFIG_MAPPING and (name in MODEL_MAPPING_NAMES or name in _OTHER_BASES)
)
"""All encoders of text."""

_SHORTEST = {"canine": 16, "funnel": 7}
"""Types whose code does not run on fewer tokens, in the library either."""


def classes(model_type: str) -> list[str]:
    """The base class of a type, and those with heads for labels and the vocabulary."""
    base = _OTHER_BASES.get(model_type) or MODEL_MAPPING_NAMES[model_type]
    names = [base if isinstance(base, str) else base[0]]
    if model_type not in _OTHER_BASES:
        names += [mapping[model_type] for mapping in _HEADS if model_type in mapping]
    return names


def tiny_config(model_type: str) -> PretrainedConfig:
    """A config of few small layers."""
    kind = CONFIG_MAPPING[model_type]
    default = kind().to_dict()
    names = set(default) | set(inspect.signature(kind.__init__).parameters)
    sizes = {**{name: value for keys, value in SIZES.items() for name in keys}, "is_decoder": False, "causal": False}
    values = {name: value for name, value in sizes.items() if name in names and default.get(name) is not None}
    return kind(**{**values, **SPECIAL.get(model_type, {})})


def write_checkpoint(folder: Path, model_type: str, name: str, seed: int = 0) -> PreTrainedModel:
    """Writes a checkpoint of random weights of the class `name`; returns the library's model."""
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    if name.endswith((_OF_SEQUENCES, _OF_TOKENS)):
        config.num_labels = 3
    model: PreTrainedModel = getattr(transformers, name)(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in key:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.config.architectures = [name]
    model.save_pretrained(folder)
    return model.eval().float()


@torch.inference_mode()
def output_of(reference: PreTrainedModel, prompt: list[int]) -> Any:
    """What the library's model makes of one sequence."""
    return reference(input_ids=torch.tensor([prompt]))


@torch.inference_mode()
def measure(folder: Path, reference: PreTrainedModel, implementation: ModelImplementation) -> float:
    """The largest difference of a class's output, of prompts together and in another order.

    Raises:
        ModelLoadError: the implementation does not take the checkpoint.
    """
    options = ModelConfig(model=str(folder), model_impl=implementation, dtype="float32", runner="pooling")
    spec = read_model_spec(folder, options)
    context = model_context(spec)
    with contextlib.closing(context.weights):
        model: Any = build_model(spec, context)
    found = [0.0]
    shortest = _SHORTEST.get(spec.hf_config["model_type"], 1)
    given = [prompt for prompt in PROMPTS if len(prompt) >= shortest]
    for prompts in (given, given[::-1]):
        for states, prompt in zip(encode(model, prompts, context.ops), prompts, strict=True):
            output = output_of(reference, prompt)
            if spec.architecture.endswith(_OF_SEQUENCES):
                pooled = pool(
                    states,
                    next(iter(getattr(model, "label_poolings", ())), None) or resolve_pooling(options, spec).sequence,
                )
                found.append(_difference(model.classify(pooled.float().to(DEVICE)), output.logits))
            elif spec.architecture.endswith(_OF_TOKENS):
                found.append(_difference(model.classify(states.float().to(DEVICE)), output.logits[0]))
            elif "logits" in output:
                found.append(_difference(model.compute_logits(states.to(DEVICE)), output.logits[0]))
            elif output[0].dim() == 2:  # the vector of a text alone
                found.append(_difference(pool(states, "CLS"), output[0]))
            else:
                found.append(_difference(states, output[0][0]))
    return max(found)


def pool(states: Tensor, way: str) -> Tensor:
    """One row of the states of a sequence, as our poolers make it."""
    return {"CLS": states[:1], "LAST": states[-1:], "MEAN": states.mean(0, keepdim=True)}[way]


def encode(model: Model, prompts: list[list[int]], ops: Any) -> list[Tensor]:
    """The hidden states of all prompts, computed together."""
    lengths = np.array([len(prompt) for prompt in prompts])
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    step = StepContext(positions, [], [], sequences=ops.sequence_batch(lengths, torch.device(DEVICE)))
    token_ids = torch.tensor([*itertools.chain(*prompts)]).to(DEVICE)
    return list(model.forward(token_ids, step).cpu().split(lengths.tolist()))


def _difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference; of numbers beyond 1, relative to the largest of them."""
    if got.shape != expected.shape:
        return float("inf")
    difference = ((got.cpu() - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
    return float("inf") if np.isnan(difference) else difference
