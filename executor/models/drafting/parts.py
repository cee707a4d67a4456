"""The parts that heads which draft have in common."""

import dataclasses

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.vocabulary import Embedding, Head
from quire.executor.weights.quantization.unquantized import Unquantized


def ends_of(spec: ModelSpec, context: ModelContext) -> tuple[Embedding, Head]:
    """Returns the target's embedding and head.

    Raises:
        ModelLoadError: the target's class does not show them.
    """
    if context.target_ends is None:
        raise ModelLoadError(
            f"{spec.name} drafts with the embedding and the head of its target, which the target's class does not "
            "show: serve the target without --speculative-config."
        )
    return context.target_ends


def places_of(spec: ModelSpec) -> list[LayerPlace]:
    """Lists the places of all layers."""
    return [LayerPlace(index, index, is_last=index == spec.num_layers - 1) for index in range(spec.num_layers)]


def has_tensor(context: ModelContext, name: str) -> bool:
    """Returns True if the checkpoint has a tensor of this name."""
    return context.find(name) is not None


def plain_scheme(context: ModelContext, layer: str) -> ModelContext:
    """Returns the context for a layer that quantized checkpoints keep in a wide type, if this one does."""
    stored = context.find(f"{layer}.weight")
    if stored is None or not stored.dtype.is_floating_point or stored.dtype.itemsize == 1:
        return context
    return dataclasses.replace(context, scheme=Unquantized())
