"""bitsandbytes: LLM.int8() (arXiv:2208.07339), and blocks of NF4 or FP4 (QLoRA, arXiv:2305.14314)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.bit_packing import table
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.executor.weights.readers import Shard
from quire.ops.quantized import QuantizedWeight

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution: appendix E of the QLoRA paper."""
_BYTE = 127
"""The code of the largest magnitude of an output, which `SCB` holds."""


@dataclass(frozen=True)
class RowInt8:
    """Codes `weight` [out, in] int8, and `SCB` [out], the largest magnitude of each output."""

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("weight", torch.int8) and layer.has("SCB")

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        codes = layer.read("weight", (layer.out_features, layer.in_features), torch.int8)
        largest = layer.read("SCB", (layer.out_features,), torch.float32)
        return QuantizedWeight(codes, largest.unsqueeze(1) / _BYTE)


@dataclass(frozen=True)
class BlockFloat4:
    """Codes `weight` uint8 [bytes, 1], two a byte, the upper half first, over all rows one after another.

    `weight.absmax` has the largest magnitude of each block of `block_size` values. With double quantization it has
    codes instead: a magnitude is `weight.nested_quant_map`[code] * `weight.nested_absmax` (one for 256 blocks) + an
    offset in `weight.quant_state.…`.
    """

    kind: str = "nf4"
    block_size: int = 64
    is_nested: bool = True

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("weight", torch.uint8) and layer.has("weight.absmax")

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        if size % 2:
            raise ModelLoadError(f"{layer.name}: rows of {size} numbers do not end with a byte, so they are not read.")
        count = out * size
        shape = layer.shape("weight", (count // 2, 1))
        if math.prod(shape) != count // 2:
            raise layer.mismatch("weight", f"{count // 2} bytes of two codes")
        wanted = Shard(0, layer.rows.start * size // 2, layer.rows.stop * size // 2)
        packed = layer.source.read(f"{layer.name}.weight", shape, wanted, torch.uint8).view(len(layer.rows), -1)
        state = self._state(layer)
        num_blocks = math.prod(layer.shape("weight.absmax", (-(-count // self.block_size),)))
        block = 1 << max(0, -(-count // max(1, num_blocks)) - 1).bit_length()  # the last block of all may be shorter
        if num_blocks != -(-count // block) or _whole(state, "blocksize", block) != block:
            raise layer.mismatch("weight.absmax", f"numbers of blocks of {state.get('blocksize', 'as many')} numbers")
        magnitudes = self._magnitudes(layer, num_blocks, state)
        group = math.gcd(block, size)
        scales = magnitudes.repeat_interleave(block // group)[: count // group].view(out, -1)
        values = self._values(layer)
        return QuantizedWeight(
            (packed >> 4) | (packed << 4), scales[layer.rows.start : layer.rows.stop].contiguous(), values
        )

    def _magnitudes(self, layer: StoredLayer, num_blocks: int, state: Mapping[str, Any]) -> Tensor:
        """Reads the largest magnitude of each block of the whole layer, float32."""
        shape = (num_blocks,)
        if not (layer.has("weight.nested_absmax") or (not layer.is_known and self.is_nested)):
            return layer.read("weight.absmax", shape, torch.float32, dim=None)
        codes = layer.read("weight.absmax", shape, torch.uint8, dim=None)
        values = layer.read("weight.nested_quant_map", (256,), torch.float32, dim=None)
        per, offset = _whole(state, "nested_blocksize", 256), state.get("nested_offset", 0.0)
        outer = layer.read("weight.nested_absmax", (-(-num_blocks // per),), torch.float32, dim=None)
        return values[codes.int()] * outer.repeat_interleave(per)[:num_blocks] + offset

    def _values(self, layer: StoredLayer) -> Tensor:
        stored = layer.read("weight.quant_map", (16,), torch.float32, dim=None)
        return table(NF4 if stored.is_meta else tuple(stored.tolist()), stored.device)

    def _state(self, layer: StoredLayer) -> Mapping[str, Any]:
        """Reads the JSON that the library stores in a tensor of bytes."""
        kinds = [f"weight.quant_state.bitsandbytes__{kind}" for kind in (self.kind, "nf4", "fp4")]
        kind = next((each for each in kinds if layer.has(each)), kinds[0])
        if layer.is_known and not layer.has(kind) and not layer.has("weight.nested_absmax"):
            return {}  # blocks with float magnitudes: their count determines the size
        text = layer.read(kind, layer.shape(kind, (0,)), torch.uint8, dim=None)
        if text.is_meta or not layer.is_known:
            return {}
        try:
            state = json.loads(bytes(text.flatten().tolist()))
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, Mapping) or not _is_state(state):
            raise layer.mismatch(kind, "bitsandbytes' JSON, of sizes of blocks and an offset")
        return state


def _whole(state: Mapping[str, Any], field: str, default: int) -> int:
    found = state.get(field)
    return default if found is None else int(found)


def _is_state(state: Mapping[str, Any]) -> bool:
    """Checks that the block sizes are positive integers and that the offset is a number."""
    sizes = [state.get(field) or 1 for field in ("blocksize", "nested_blocksize")]
    offset = state.get("nested_offset", 0.0)
    return all(type(size) is int and size > 0 for size in sizes) and type(offset) in (int, float)
