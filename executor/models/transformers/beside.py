"""The towers of a class whose decoder a file here implements: all of the class but its language model."""

from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.executor.layers.context import ModelContext
from quire.executor.models.transformers.absent_modules import leave_out
from quire.executor.models.transformers.checkpoint import ModuleWeights, fill
from quire.executor.models.transformers.skeleton import build_skeleton, takes
from quire.executor.models.transformers.towers import Towers, takes_any

logger = get_logger(__name__)


def build_towers_beside(spec: ModelSpec, context: ModelContext) -> Towers | None:
    """Builds the towers of the class of `spec`, with their weights loaded.

    None, with a line in the log, if it has none, or their code does not fit.
    """
    try:
        model = build_skeleton(spec, context.dtype, context.max_model_len)
        parts = _find_parts(model)
        if parts is None:
            return None
        entry, text = parts
        weights = ModuleWeights(context.weights, model, ())
        towers = Towers(model, entry, text, context)
        if "image" not in towers.support.modalities:
            return None
        towers.support = towers.support._replace(
            modalities=[each for each in towers.support.modalities if each != "audio"]
        )
        towers.text = leave_out(model, text)
        head = model.get_output_embeddings()
        if head is not None and head in set(model.modules()):
            leave_out(model, head)
        for tower in list(entry.children()):
            if isinstance(tower, PreTrainedModel) and tower.input_modalities in ("audio", ["audio"], ("audio",)):
                leave_out(model, tower)
        towers.modules = dict.fromkeys(model.modules())
        towers.replace_layers(replace(context, weights=weights))
        if towers.support.num_deep:
            raise ModelLoadError("its tower makes features for layers of the decoder, whose file here takes none")
        fill(model, weights, context.device)
        towers.settle()
    except Exception as error:  # the code of a model may raise anything
        logger.info("%s reads text alone: %s", spec.architecture, error)
        return None
    return towers


def _find_parts(model: PreTrainedModel) -> tuple[nn.Module, nn.Module] | None:
    """Finds the part of `model` that takes pixels, and the language model that it calls; None: it takes none."""
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    parts = name.split(".")
    chain = [model.get_submodule(".".join(parts[:length])) for length in range(len(parts) + 1)]
    entry = max((place for place, module in enumerate(chain) if takes_any(module, "image")), default=None)
    if entry is None:
        return None
    text = next((module for module in chain[entry + 1 :] if takes(module, "inputs_embeds")), None)
    return None if text is None else (chain[entry], text)
