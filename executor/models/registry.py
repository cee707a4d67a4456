"""Builds a checkpoint's model: from the file here that implements it, or from its Transformers class."""

import importlib
from collections.abc import Callable
from types import ModuleType

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.executor.layers.attention.layer_kv import LatentKV
from quire.executor.models.architectures import ARCHITECTURES, UNDER_OTHER_NAMES, WITH_ROTATION
from quire.executor.models.base import EncoderDecoder, Model, ModelContext, ReadsMedia, StagedModel
from quire.executor.models.decoder import SIZES, SettingError, check_supported
from quire.executor.models.reading import ReadingDecoder
from quire.executor.models.unsupported import explain_unsupported
from quire.executor.weights.readers import MissingTensorError

logger = get_logger(__name__)


def is_native(model: Model) -> bool:
    """Returns True if a file here implements the model, False for a Transformers class."""
    return not type(model).__module__.startswith(f"{__package__}.transformers.")


def build_model(spec: ModelSpec, context: ModelContext) -> Model:
    """Builds the model of `spec.architecture` with its weights loaded, in the implementation that `spec` asks for.

    Raises:
        ModelLoadError: neither a file here nor Transformers has the architecture; the checkpoint does not fit it; the
            class cannot be divided into pipeline stages; or there are no experts to divide over ranks.
    """
    if spec.drafts_by is not None:
        # Imported here because few servers need them.
        from quire.executor.models.drafting.registry import build_drafting

        return build_drafting(spec, context)
    model = _build(spec, context)
    if spec.is_encoder and (model.kv_layers or model.state_layers):
        raise ModelLoadError(
            f"{spec.name}: config.json says that its tokens see later ones (is_causal false, or "
            f"use_bidirectional_attention), which the file of {spec.architecture} does not support."
        )
    is_staged = isinstance(model, StagedModel) and not isinstance(model, EncoderDecoder)
    if len(context.layers) < spec.num_layers and not is_staged:
        raise ModelLoadError(
            f"{spec.name}: the class of {spec.architecture} cannot be divided into pipeline stages; use "
            "--tensor-parallel-size instead of --pipeline-parallel-size."
        )
    context.sequences.check_model(spec.name, model.kv_layers, has_states=bool(model.state_layers))
    if context.experts is not None and not context.experts.layers and len(context.layers) == spec.num_layers:
        raise ModelLoadError(
            f"{spec.name} has no experts that could be divided over ranks; start without --enable-expert-parallel."
        )
    return model


def import_model(spec: ModelSpec) -> None:
    """Imports the code of a model, as far as it is known without the checkpoint's weights. What is missing shows when
    the model is built."""
    if spec.model_class is not None and spec.implementation == "auto":
        return
    own = _own_architecture(spec)
    if own in ARCHITECTURES and spec.implementation != "transformers":
        _import_file(own)
    elif spec.implementation != "quire":
        importlib.import_module(f"{__package__}.transformers")


def _import_file(architecture: str) -> ModuleType:
    module_name, _ = ARCHITECTURES[architecture]
    return importlib.import_module(f"quire.executor.models.{module_name}")  # lazy: only one family is needed


def _build(spec: ModelSpec, context: ModelContext) -> Model:
    if spec.model_class is not None and spec.implementation == "auto":
        return _registered_class(spec)(spec, context)
    has_file = _own_architecture(spec) in ARCHITECTURES
    if spec.implementation == "transformers" or (spec.implementation == "auto" and not has_file):
        return _transformers_model(spec, context)
    try:
        return _with_towers(build_own(spec, context), spec, context)
    except (SettingError, MissingTensorError) as refusal:
        is_divided = len(context.layers) < spec.num_layers  # in that case other stages may have found their tensors
        if spec.implementation == "quire" or (isinstance(refusal, MissingTensorError) and is_divided):
            raise
        try:
            model = _transformers_model(spec, context)
        except MissingTensorError:
            raise refusal from None
        except ModelLoadError as error:
            raise ModelLoadError(f"{refusal} Nor does its class of Transformers serve it: {error}") from error
        logger.info("%s Its class of Transformers is served instead.", refusal)
        return model


def build_own(spec: ModelSpec, context: ModelContext) -> Model:
    """Builds the model from its file here.

    Raises:
        ModelLoadError: there is none, or the checkpoint does not fit it.
    """
    own = _own_architecture(spec)
    if own not in ARCHITECTURES:
        raise ModelLoadError(explain_unsupported(spec, ARCHITECTURES))
    _, class_name = ARCHITECTURES[own]
    model_class = getattr(_import_file(own), class_name)
    check_supported(spec, getattr(model_class, "SIZES", SIZES))
    return model_class(spec, context)


def _with_towers(model: Model, spec: ModelSpec, context: ModelContext) -> Model:
    """Adds the towers that the class of a checkpoint has in Transformers, if it has a decoder among other parts."""
    if not context.reads_media or "text_config" not in spec.config_json:
        return model
    if isinstance(model, EncoderDecoder | ReadsMedia):
        return model
    if any(isinstance(layer, LatentKV) and layer.rate > 1 for layer in model.kv_layers):
        logger.info(
            "%s reads text alone: its file keeps rows of several tokens together, rotated by their positions, which "
            "images shift",
            spec.architecture,
        )
        return model
    # Imported here because it takes a second, and few models need it.
    from quire.executor.models.transformers import build_towers_beside

    towers = build_towers_beside(spec, context)
    return model if towers is None else ReadingDecoder(model, towers)


_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForProcessRewardModel", "ForRewardModel", "Model")
"""Endings of the names of classes that are a decoder with another head, or with none."""


def _own_architecture(spec: ModelSpec) -> str:
    """Returns the architecture whose file here reads the checkpoint: of a decoder with another head, the decoder's."""
    own = UNDER_OTHER_NAMES.get(str(spec.hf_config.get("model_type")), spec.architecture)
    if spec.hf_config.get("position_embedding_type") == "rotary":
        own = WITH_ROTATION.get(own, own)
    if own in ARCHITECTURES:
        return own
    stem = next((own.removesuffix(head) for head in _HEADS if own.endswith(head)), own)
    decoders = (f"{stem}ForCausalLM", f"{stem}LMHeadModel", f"{stem.removesuffix('Text')}ForCausalLM")
    return next((name for name in decoders if name in ARCHITECTURES), own)


def _transformers_model(spec: ModelSpec, context: ModelContext) -> Model:
    # Imported here because it takes a second, and few models need it.
    from quire.executor.models.transformers import UnknownModelError, build_transformers_model

    if context.experts is not None and context.experts.num_engines > 1:
        raise ModelLoadError(
            f"{spec.name}: classes of Transformers cannot share experts between engines; start without "
            "--enable-expert-parallel, or without --data-parallel-size."
        )
    try:
        return build_transformers_model(spec, context)
    except UnknownModelError:
        raise ModelLoadError(explain_unsupported(spec, ARCHITECTURES)) from None


def _registered_class(spec: ModelSpec) -> Callable[[ModelSpec, ModelContext], Model]:
    assert spec.model_class is not None
    module_name, _, class_name = spec.model_class.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(
            f"{spec.model_class!r}, registered for {spec.architecture}, cannot be imported by a worker: {error}. "
            "Install its package, or set PYTHONPATH to its folder."
        ) from error
