"""GPTQ (arXiv:2210.17323), as AutoGPTQ, GPTQModel and AutoRound write it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.act_order import ordered_integers, read_order
from quire.executor.weights.quantization.bit_packing import integers, packed_integers, unpack
from quire.executor.weights.quantization.fields import integer
from quire.executor.weights.quantization.groups import equal_groups, num_groups_of
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.linear import LinearWeight

_BITS = (2, 3, 4, 8)
"""The supported widths of a code."""
_FIRST, _SECOND = "gptq", "gptq_v2"
"""The versions of the format."""


@dataclass(frozen=True)
class Gptq:
    """Codes `qweight` int32 [words, out], whose words are packed along the inputs.

    With `scales` [groups, out], `qzeros` int32 [groups, words], and perhaps `g_idx` [in], each input's group.

    Attributes:
        bits: expected, as are the next three, where the tensors are not known.
        group_size: inputs of a group; -1: all.
        zero_shift: added to a stored zero point: 1 in the first version of the format.
    """

    bits: int = 4
    group_size: int = 128
    is_symmetric: bool = True
    is_ordered: bool = False
    zero_shift: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Gptq":
        """Builds the layer format that a quantization config describes."""
        version = config.get("checkpoint_format") or _FIRST
        if version not in (_FIRST, _SECOND):
            raise ModelLoadError(
                f"config.json's quantization_config has {version!r} as checkpoint_format, which is not read; take a "
                f"checkpoint in {_FIRST} or {_SECOND}."
            )
        return cls(
            bits=integer(config, "bits", 4),
            group_size=integer(config, "group_size", 128),
            is_symmetric=bool(config.get("sym", True)),
            is_ordered=bool(config.get("desc_act", False)),
            zero_shift=0 if version == _SECOND else 1,
        )

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("qweight", torch.int32) and layer.has("scales")

    def read(self, layer: StoredLayer) -> LinearWeight:
        out, size = layer.out_features, layer.in_features
        bits, shape = self._form(layer)
        words = layer.read("qweight", shape, torch.int32, dim=1).t().contiguous()
        num_groups, *_ = layer.shape("scales", (num_groups_of(size, self.group_size), out)) or (0,)
        scales = layer.read("scales", (num_groups, out), layer.scale_dtype("scales"), dim=1).t().contiguous()
        zeros = self._zeros(layer, bits, num_groups)
        if self.is_ordered and layer.is_known and not layer.has("g_idx"):
            raise layer.mismatch("g_idx", "each input's group (desc_act: true)")
        order = read_order(layer, "g_idx", num_groups, self.group_size, is_expected=self.is_ordered)
        if order is not None:
            return ordered_integers(unpack(words, bits, size), bits, scales, zeros, order, layer.dtype)
        group = layer.group_size("scales", num_groups, self.group_size)
        scales, zeros = equal_groups(scales, size, group), None if zeros is None else equal_groups(zeros, size, group)
        if bits == 4:
            return packed_integers(words.view(torch.uint8), bits, scales, zeros)
        return integers(unpack(words, bits, size), bits, scales, zeros)

    def _form(self, layer: StoredLayer) -> tuple[int, tuple[int, int]]:
        """Returns the bits of a code, which may differ from layer to layer, and the shape of the words.

        Raises:
            ModelLoadError: the codes are not packed along the inputs.
        """
        shapes = {bits: (-(-layer.in_features * bits // 32), layer.out_features) for bits in _BITS}
        stored = layer.shape("qweight", shapes.get(self.bits, ()))
        found = next((bits for bits in (self.bits, *_BITS) if shapes.get(bits) == stored), None)
        if found is None:
            wanted = ", ".join(f"{list(shape)} for {bits} bits" for bits, shape in shapes.items())
            raise layer.mismatch("qweight", f"GPTQ's words: {wanted}")
        return found, shapes[found]

    def _zeros(self, layer: StoredLayer, bits: int, num_groups: int) -> Tensor | None:
        """Reads the zero points [outputs, groups]; None if all are the middle."""
        if layer.is_known and not layer.has("qzeros"):
            if self.is_symmetric:
                return None
            raise layer.mismatch("qzeros", "zero points (sym: false)")
        words = layer.read("qzeros", (num_groups, -(-layer.out_features * bits // 32)), torch.int32, dim=None)
        stored = unpack(words, bits, layer.out_features).t()[layer.rows.start : layer.rows.stop]
        zeros = (stored + self.zero_shift) & ((1 << bits) - 1)
        is_real = layer.is_known and not zeros.is_meta
        is_middle = bool((zeros == 1 << (bits - 1)).all()) if is_real else self.is_symmetric
        return None if is_middle else zeros
