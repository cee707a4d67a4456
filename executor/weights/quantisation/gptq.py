"""GPTQ (arXiv:2210.17323), as AutoGPTQ, GPTQModel and AutoRound write it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.executor.weights.quantisation.codes import integers, packed_integers, unpack
from quire.executor.weights.quantisation.input_orders import ordered_integers, read_order
from quire.executor.weights.quantisation.stored_layer import StoredLayer
from quire.ops.backend import LinearWeight


@dataclass(frozen=True)
class Gptq:
    """See `Layout`: `qweight` int32 [words, out], whose words are packed along the inputs.

    With `scales` [groups, out], `qzeros` int32 [groups, words], and perhaps `g_idx` [in], each input's group.

    Attributes:
        bits: expected, as are the next three, where the tensors are not known.
        group_size: inputs of a group; -1: all.
        zero_shift: what is added to a stored zero point: 1 in the first version of the format.
    """

    bits: int = 4
    group_size: int = 128
    is_symmetric: bool = True
    is_ordered: bool = False
    zero_shift: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Gptq":
        """The layout that a quantization config describes."""
        is_second = config.get("checkpoint_format") == "gptq_v2"
        return cls(
            bits=config.get("bits", 4),
            group_size=config.get("group_size", 128),
            is_symmetric=config.get("sym", True),
            is_ordered=bool(config.get("desc_act", False)),
            zero_shift=0 if is_second else 1,
        )

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("qweight", torch.int32) and layer.has("scales")

    def read(self, layer: StoredLayer) -> LinearWeight:
        out, size = layer.out_features, layer.in_features
        shape = layer.shape("qweight", (size * self.bits // 32, out))
        bits = 32 * shape[0] // size
        words = layer.read("qweight", shape, torch.int32, dim=1).t().contiguous()
        num_groups = 1 if self.group_size < 1 else -(-size // self.group_size)
        shape = layer.shape("scales", (num_groups, out))
        scales = layer.read("scales", shape, layer.scale_dtype("scales"), dim=1).t().contiguous()
        zeros = self._zeros(layer, bits, shape[0])
        order = read_order(layer, "g_idx", shape[0], is_expected=self.is_ordered)
        if order is not None:
            return ordered_integers(unpack(words, bits, size), bits, scales, zeros, order, layer.dtype)
        if bits == 4:
            return packed_integers(words.view(torch.uint8), bits, scales, zeros)
        return integers(unpack(words, bits, size), bits, scales, zeros)

    def _zeros(self, layer: StoredLayer, bits: int, num_groups: int) -> Tensor | None:
        """[outputs, groups]; None where all are the middle."""
        if layer.is_known and not layer.has("qzeros"):
            return None
        shape = layer.shape("qzeros", (num_groups, layer.out_features * bits // 32))
        words = layer.read("qzeros", shape, torch.int32, dim=None)
        stored = unpack(words, bits, layer.out_features).t()[layer.rows.start : layer.rows.stop]
        zeros = (stored + self.zero_shift) & ((1 << bits) - 1)
        is_real = layer.is_known and not zeros.is_meta
        is_middle = bool((zeros == 1 << (bits - 1)).all()) if is_real else self.is_symmetric
        return None if is_middle else zeros
