"""One linear layer of a checkpoint, as a format sees it: tensors by kind, cut to the outputs that are wanted."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.weights.quantisation.codes import powers_of_two
from quire.executor.weights.readers import Shard, Stored, TensorSource


@dataclass(frozen=True)
class StoredLayer:
    """A layer, and the neighbouring outputs of it that are read.

    Attributes:
        name: the layer's; its tensors are `name.kind`.
        out_features: outputs of the whole layer.
        rows: the outputs that are read.
        dtype: the model's.
    """

    source: TensorSource
    name: str
    out_features: int
    in_features: int
    rows: range
    dtype: torch.dtype

    @property
    def is_known(self) -> bool:
        """Whether the checkpoint's tensors are known by name; else there is one of any name."""
        return self.find("\0", Stored((), torch.uint8)) is None

    def find(self, kind: str, otherwise: Stored | None = None) -> Stored | None:
        """What is stored as `kind`; `otherwise`, if nobody knows."""
        return self.source.find(f"{self.name}.{kind}", otherwise)

    def has(self, kind: str, dtype: torch.dtype | None = None) -> bool:
        """Whether there is such a tensor. False if nobody knows."""
        found = self.find(kind)
        return found is not None and dtype in (None, found.dtype)

    def shape(self, kind: str, expected: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is stored as `kind`; `expected`, if nobody knows or there is nothing."""
        found = self.find(kind)
        return expected if found is None else found.shape

    def stored_dtype(self, kind: str, expected: torch.dtype) -> torch.dtype:
        """As `shape`."""
        found = self.find(kind)
        return expected if found is None else found.dtype

    def read(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, *, dim: int | None = 0, per: int = 1
    ) -> Tensor:
        """The tensor, cut to the wanted outputs.

        Args:
            shape: of the whole tensor.
            dim: the dimension of the outputs; None: the tensor has none, and is read whole.
            per: outputs that share an index of that dimension. The first and the last index may be of others too, which
                `trim` cuts off.
        """
        name = f"{self.name}.{kind}"
        if dim is None or (self.rows.start, self.rows.stop) == (0, self.out_features):
            return self.source.read(name, shape, None, dtype)
        shard = Shard(dim, self.rows.start // per, -(-self.rows.stop // per))
        return self.source.read(name, shape, shard, dtype)

    def trim(self, tensor: Tensor, dim: int, per: int) -> Tensor:
        """Of what was read with `per` and now has an index for each output: the wanted ones."""
        return tensor.narrow(dim, self.rows.start % per, len(self.rows))

    def scale_dtype(self, kind: str) -> torch.dtype:
        """The dtype in which scales are kept: that of the checkpoint, if it is a plain float of 16 bits."""
        stored = self.stored_dtype(kind, self.dtype)
        return stored if stored in (torch.float16, torch.bfloat16) else torch.float32

    def scales(self, kind: str = "weight_scale", block: tuple[int, int] | None = None) -> Tensor:
        """Scales of any granularity, [outputs, groups]: of the tensor, an output, a group, or a block.

        Args:
            block: outputs and inputs that share a scale where neither is one or all; None: an output's group. Scales of
                the tensor, of outputs or of groups may be there instead.
        """
        is_exponent = self.stored_dtype(kind, torch.float32) in (torch.uint8, torch.float8_e8m0fnu)
        dtype = self.stored_dtype(kind, torch.float32) if is_exponent else self.scale_dtype(kind)
        scales = self._scales(kind, block, dtype)
        return powers_of_two(scales) if is_exponent else scales

    def _scales(self, kind: str, block: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
        groups = 1 if block is None else -(-self.in_features // block[1])
        outputs = self.out_features if block is None else -(-self.out_features // block[0])
        shape = self.shape(kind, (outputs, groups))
        if shape in ((), (1,), (1, 1)):
            return self.read(kind, shape, dtype, dim=None).reshape(1, 1).repeat(len(self.rows), 1)
        if shape[0] == self.out_features:
            scales = self.read(kind, shape, dtype).reshape(len(self.rows), -1)
        else:
            per = block[0] if block is not None else -(-self.out_features // shape[0])
            blocks = self.read(kind, shape, dtype, per=per)
            scales = self.trim(blocks.reshape(len(blocks), -1).repeat_interleave(per, 0), 0, per).contiguous()
        return scales if block is None else self._whole_groups(scales, block[1])

    def _whole_groups(self, scales: Tensor, block: int) -> Tensor:
        """Scales of groups of one size, where the last block of inputs is shorter than the others."""
        num_groups, num_blocks = scales.shape[1], -(-self.in_features // block)
        if self.in_features % block == 0 or num_groups == 1 or num_groups != num_blocks:
            return scales
        size = math.gcd(block, self.in_features)
        return scales.repeat_interleave(block // size, 1)[:, : self.in_features // size].contiguous()
