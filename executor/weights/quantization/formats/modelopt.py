"""The layer format that only NVIDIA's Model Optimizer writes: bytes with the 4-bit codes of two outputs."""

from dataclasses import dataclass

import torch

from quire.executor.weights.quantization.bit_packing import pack_pairs, packed_integers
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.quantized import QuantizedWeight

LOW_RANK = (
    ("svdquant_lora_a", "svdquant_lora_b"),
    ("weight_quantizer._svdquant_lora_a", "weight_quantizer._svdquant_lora_b"),
)
"""SVDQuant's tensors (arXiv:2411.05007), under the two sets of names that the library writes."""


@dataclass(frozen=True)
class PairedOutputs:
    """Codes `weight` uint8 [out / 2, in] in two's complement, an even output in the lower half of a byte and the next
    one in the upper half; and `weight_scale` [out, groups].

    Attributes:
        group_size: inputs of a group, for layers whose tensors do not determine it.
    """

    group_size: int = 128

    def is_in(self, layer: StoredLayer) -> bool:
        stored = layer.find("weight")
        size = (layer.out_features // 2, layer.in_features)
        return stored is not None and stored == (size, torch.uint8) and layer.has("weight_scale")

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        pairs = layer.read("weight", (out // 2, size), torch.uint8, per=2)
        codes = layer.trim(torch.stack((pairs & 15, pairs >> 4), dim=1).flatten(0, 1), 0, 2)
        return packed_integers(pack_pairs(codes ^ 8), 4, layer.scales("weight_scale", (1, self.group_size)))
