"""Layers whose inputs are multiplied by factors first (AWQ, arXiv:2306.00978; SmoothQuant, arXiv:2211.10438)."""

from dataclasses import dataclass

import torch

from quire.executor.weights.quantisation import cuts
from quire.executor.weights.quantisation.checkpoint_format import Layout
from quire.executor.weights.quantisation.notes import note_plain
from quire.executor.weights.quantisation.stored_layer import StoredLayer
from quire.ops.backend import LinearWeight


@dataclass(frozen=True)
class ScaledInputs:
    """See `Layout`: another one, of which some layers have factors of their inputs.

    These have no quantised form, in which neighbouring inputs share a scale: they become plain numbers.

    Attributes:
        factors: the kind of the tensor: a factor for each input, or one for all.
    """

    layout: Layout
    factors: str = "pre_quant_scale"

    def is_in(self, layer: StoredLayer) -> bool:
        return self.layout.is_in(layer)

    def read(self, layer: StoredLayer) -> LinearWeight:
        weight = self.layout.read(layer)
        if not layer.has(self.factors):
            return weight
        note_plain(layer.dtype, "with a factor for each input")
        shape = layer.shape(self.factors, (layer.in_features,))
        factors = layer.read(self.factors, shape, torch.float32, dim=None)
        return (cuts.plain(weight, torch.float32) * factors.reshape(1, -1)).to(layer.dtype)
