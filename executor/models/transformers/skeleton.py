"""Builds the checkpoint's own Transformers class without memory for its weights.

Parameters lie on torch's meta device. Buffers, such as the frequencies of rotary embeddings, are computed as usual.
"""

import contextlib
import inspect
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.executor import light_torch

logger = get_logger(__name__)

light_torch.complete()  # the library's classes may use any torch operation on the meta device


_BUILDING = threading.Lock()
"""Held while modules of the library are changed, which all threads share: ranks may be threads of one process."""


class UnknownModelError(ModelLoadError):
    """Transformers has no such model."""


def build_skeleton(
    spec: ModelSpec, dtype: torch.dtype, max_model_len: int, *, generates: bool = True
) -> PreTrainedModel:
    """Builds the model of `spec` for inference, its parameters without memory.

    A decoder that does not generate is built with its embedding for a head, which the checkpoint may lack.

    Raises:
        UnknownModelError: Transformers has no such model.
        ModelLoadError: Transformers cannot build it from this config.json.
    """
    try:
        config = _config(spec)
        model_class = _model_class(spec, config)
        if not generates and not spec.is_encoder and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model_class, config.tie_word_embeddings = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], True
        is_masked = model_class is MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None)  # XLM has one class for both
        if spec.is_encoder and not is_masked and model_class is MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None):
            model_class = MODEL_MAPPING[type(config)]  # whose head nothing reads
        pooler = "add_pooling_layer"  # of a base class, which nothing reads and checkpoints may lack
        options = {pooler: False} if spec.is_encoder and pooler in inspect.signature(model_class).parameters else {}
        with _BUILDING, _parameters_on_meta(), no_init_weights():
            # "eager" is the one implementation that every class has; decoders never run it.
            model = model_class._from_config(
                config, dtype=dtype, attn_implementation="eager", experts_implementation="eager", **options
            )
    except UnknownModelError:
        raise
    except Exception as error:  # a config that Transformers rejects may raise anything
        raise ModelLoadError(
            f"Transformers {transformers.__version__} cannot build {spec.architecture} from config.json of "
            f"{spec.name}: {type(error).__name__}: {error}"
        ) from error
    _show_head(model)
    _fix_rotary_length(model, max_model_len)
    return model.eval()


def _show_head(model: PreTrainedModel) -> None:
    """Lets a class whose head is that of a model inside tell so."""
    if model.get_output_embeddings() is None:
        inner = (child for child in model.children() if isinstance(child, PreTrainedModel))
        own = next((child for child in inner if child.get_output_embeddings() is not None), None)
        if own is not None:
            model.get_output_embeddings = own.get_output_embeddings  # type: ignore[method-assign]


def _config(spec: ModelSpec) -> PretrainedConfig:
    values = dict(spec.config_json)
    values.pop("dtype", None)
    values.pop("torch_dtype", None)
    config_class = _own_class(spec, "AutoConfig")
    if config_class is not None:
        values.pop("model_type", None)
        return config_class.from_dict(PretrainedConfig._decode_special_floats(values))
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UnknownModelError(f"Transformers does not know model_type {model_type!r} of {spec.name}.")
    values.pop("auto_map", None)  # the library would ask whether to run its code
    with tempfile.TemporaryDirectory() as folder:  # the library reads files, and may take a field for another type
        (Path(folder) / "config.json").write_text(json.dumps(values))
        return AutoConfig.from_pretrained(folder)


def _model_class(spec: ModelSpec, config: PretrainedConfig) -> Any:
    own_class = _own_class(spec, "AutoModelForCausalLM")
    if own_class is not None:
        return own_class
    if config.model_type != spec.hf_config.get("model_type") and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    found = getattr(transformers, spec.architecture, None)
    if found is not None and issubclass(found, PreTrainedModel):
        return found
    raise UnknownModelError(f"Transformers has no class {spec.architecture!r}, which config.json of {spec.name} names.")


def _own_class(spec: ModelSpec, auto_class: str) -> Any:
    """Returns the class from the checkpoint's own code that replaces `auto_class`, if it may be imported, else None."""
    name = spec.config_json.get("auto_map", {}).get(auto_class)
    if not name or not spec.trust_remote_code:
        return None
    logger.info("importing %s of %s, as --trust-remote-code allows", name, spec.path)
    return get_class_from_dynamic_module(name, spec.path, local_files_only=True)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Moves parameters of modules to the meta device as they are registered, while the context lasts."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fix_rotary_length(model: nn.Module, max_model_len: int) -> None:
    """Stretches rotary embeddings that follow the longest sequence so far to the longest possible one, permanently.

    A request's tokens must not depend on its neighbours.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_type = kinds if isinstance(kinds, dict) else {None: kinds}
        growing = [kind for kind, name in by_type.items() if name == "longrope" or "dynamic" in str(name)]
        for kind in growing:
            arguments = {} if kind is None else {"layer_type": kind}
            module(torch.zeros(1), torch.tensor([[max_model_len - 1]]), **arguments)
        if growing:
            fixed = {kind: "fixed" if kind in growing else name for kind, name in by_type.items()}
            vars(module)["rope_type"] = fixed if isinstance(kinds, dict) else "fixed"


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model that computes text from tokens alone: the class, or the language model inside whose head it
    has, where the class's own code demands an image (BLIP-2)."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    demanded = {each.name for each in parameters if each.default is each.empty and each.kind in named}
    if demanded <= {"input_ids"}:
        return model
    inner = (child for child in model.children() if isinstance(child, PreTrainedModel))
    head = model.get_output_embeddings()
    return next((each for each in inner if head is not None and each.get_output_embeddings() is head), model)


def takes(module: nn.Module, argument: str) -> bool:
    """Returns True if a module's `forward` has a parameter `argument`."""
    return argument in inspect.signature(module.forward).parameters


def hands_on(module: nn.Module) -> bool:
    """Returns True if a module's `forward` takes keywords that it does not name."""
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(module.forward).parameters.values())


def first_tensor(values: Any) -> Tensor:
    """Returns the main output of a module: a tensor, or the first of a tuple or `ModelOutput`."""
    return values if isinstance(values, Tensor) else values[0]
