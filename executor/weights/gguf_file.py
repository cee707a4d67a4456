"""Tensors of GGUF files, memory-mapped."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.core.wire.gguf_table import GgufTensor, read_gguf_table
from quire.executor.weights.gguf_names import BOTH, GATES, UPS
from quire.executor.weights.quantization.formats.gguf_blocks import FORMATS, PLAIN, unpack
from quire.executor.weights.readers import Shard, shard_index
from quire.ops.quantized import dequantize

_ONE_ROW = ("_inp_shexp.weight",)
_ONE_ROW_OF = {"ernie4_5-moe": (*_ONE_ROW, "exp_probs_b.bias")}
"""Endings of the names of tensors that have one dimension less than in a checkpoint, where it has a single row; by
architecture.
"""
_STACKS = ("_exps.weight", "_exps.bias", "altup_proj.weight", "altup_unembd_proj.weight")
"""Endings of the names of tensors that stack several of a checkpoint's."""
_OF_CHANNELS = ("shortconv.conv.weight", "ssm_conv1d.weight", *(f"ssm_conv1d_{part}.weight" for part in "qkv"))
"""Endings of the names of depthwise convolutions."""
_OF_GROUPS = ("ssm_norm.weight",)
"""Endings of the names of tensors that have two dimensions, groups and their elements, for a checkpoint's one."""
_OF_HEADS = ("ssm_a", "ssm_d")
"""Endings of the names of tensors that have a trailing dimension of size 1 if they have one element for each head."""
_SINGLE = ("xielu_beta", "xielu_eps")
"""Endings of the names of tensors that are scalars in a checkpoint."""
_PART = 1 << 24
"""About the most elements that are dequantized at once."""


class GgufFiles:
    """All files of a model, opened by their table of contents.

    Each member of a stack, such as the experts of `blk.0.ffn_up_exps.weight`, is a tensor, too:
    `blk.0.ffn_up_exps.3.weight`.
    """

    def __init__(self, path: Path) -> None:
        table = read_gguf_table(path)
        if not table.files:
            raise ModelLoadError(f"{path} is a table of a GGUF model without files. Remove it, or serve the GGUF file.")
        self._tensors = dict(table.tensors)
        for name, tensor in table.tensors.items():
            if name.endswith(_STACKS):
                self._tensors |= _members(name, tensor)
            else:
                shape = _shape_on_hub(name, tensor.shape, table.architecture)
                self._tensors[name] = GgufTensor(tensor.type, shape, tensor.file, tensor.offset)
        self._paths = [Path(file) for file in table.files]
        self._files = [_mapped(file) for file in self._paths]
        for name, tensor in table.tensors.items():
            if tensor.offset + math.prod(tensor.shape[:-1]) * _row_bytes(tensor) > len(self._files[tensor.file]):
                raise ModelLoadError(f"{self._paths[tensor.file]} is cut short in tensor {name!r}. Download it again.")
        self.names = frozenset(self._tensors)

    def path(self, name: str) -> Path:
        return self._paths[self._tensors[name].file]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of unquantized tensors; uint8 for blocks."""
        return PLAIN.get(self._tensors[name].type, torch.uint8)

    def read(self, name: str, shard: Shard | None, dtype: torch.dtype) -> Tensor:
        """Reads a tensor. Blocks are dequantized to `dtype`; with uint8, each row is its blocks' bytes. A shard of
        inputs then consists of whole blocks.
        """
        tensor = self._tensors[name]
        rows = self._rows(tensor)
        if tensor.type in PLAIN:
            numbers = rows.view(PLAIN[tensor.type]).view(tensor.shape)
            return numbers if shard is None else numbers[shard_index(shard)]
        last = len(tensor.shape) - 1
        if dtype == torch.uint8:
            if shard is not None and shard.dim == last:
                block, size = _block(tensor)
                shard = Shard(last, shard.start // block * size, shard.stop // block * size)
            blocks = rows.view(*tensor.shape[:-1], -1)
            return blocks if shard is None else blocks[shard_index(shard)]
        if shard is not None and shard.dim == 0 and last > 0:
            per_row = math.prod(tensor.shape[1:-1])
            shape = (shard.stop - shard.start, *tensor.shape[1:])
            return self._numbers(name, rows[shard.start * per_row : shard.stop * per_row], dtype).view(shape)
        numbers = self._numbers(name, rows, dtype).view(tensor.shape)
        return numbers if shard is None else numbers[shard_index(shard)]

    def close(self) -> None:
        self._files = []

    def _numbers(self, name: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantizes rows of blocks, [rows, in], a few rows at a time."""
        tensor = self._tensors[name]
        out = torch.empty(len(rows), tensor.shape[-1], dtype=dtype)
        size = max(1, _PART // tensor.shape[-1])
        try:
            for part, target in zip(rows.split(size), out.split(size), strict=True):
                target.copy_(_dequantized(part, tensor.type))
        except NotImplementedError:
            raise ModelLoadError(
                f"Tensor {name!r} in {self.path(name)} is of the type {tensor.type}, which is not read. Download the "
                "file again, or one of another quantization."
            ) from None
        return out

    def _rows(self, tensor: GgufTensor) -> Tensor:
        """Views the tensor's bytes, [rows, bytes of a row]."""
        count, size = math.prod(tensor.shape[:-1]), _row_bytes(tensor)
        return self._files[tensor.file][tensor.offset : tensor.offset + count * size].view(count, size)


def _shape_on_hub(name: str, shape: tuple[int, ...], architecture: str) -> tuple[int, ...]:
    """Returns the shape of the same tensor in a checkpoint on the hub."""
    if len(shape) == 1 and name.endswith(_ONE_ROW_OF.get(architecture, _ONE_ROW)):
        return (1, *shape)
    if name.endswith(_OF_CHANNELS):
        return (shape[0], 1, *shape[1:]) if len(shape) == 2 else shape[1:]  # Kimi Linear's have one dimension more
    if name.endswith(_SINGLE):
        return ()
    if name.endswith(_OF_HEADS) and len(shape) > 1 and shape[-1] == 1:
        return shape[:-1]
    return (math.prod(shape),) if name.endswith(_OF_GROUPS) else shape


def _mapped(path: Path) -> Tensor:
    try:
        return torch.from_numpy(np.memmap(path, np.uint8, mode="c"))  # "c": torch wants memory that it may write to
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Cannot map {path}: {error}.") from None


def _members(name: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
    """Lists the tensors that are stacked in one."""
    stem, _, kind = name.rpartition(".")
    size = math.prod(tensor.shape[1:-1]) * _row_bytes(tensor)
    members = {
        f"{stem}.{index}.{kind}": GgufTensor(tensor.type, tensor.shape[1:], tensor.file, tensor.offset + index * size)
        for index in range(tensor.shape[0])
    }
    if BOTH not in name:
        return members
    halves = {}
    for member, both in members.items():
        rows, *rest = both.shape
        for half, offset in ((GATES, both.offset), (UPS, both.offset + size // 2)):
            halves[member.replace(BOTH, half)] = GgufTensor(both.type, (rows // 2, *rest), both.file, offset)
    return members | halves


def _block(tensor: GgufTensor) -> tuple[int, int]:
    """Returns (elements, bytes) of a block."""
    import gguf  # optional, and only such files need it

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]]


def _row_bytes(tensor: GgufTensor) -> int:
    numbers, size = _block(tensor)
    return math.prod(tensor.shape[-1:]) // numbers * size


def _dequantized(rows: Tensor, kind: str) -> Tensor:
    if kind in FORMATS:
        return dequantize(unpack(rows, FORMATS[kind], rows.shape[1] // FORMATS[kind].size * FORMATS[kind].numbers))
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))
