"""One linear layer of a checkpoint, as a format reads it: tensors by kind, cut to the wanted outputs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.bit_packing import powers_of_two
from quire.executor.weights.quantization.groups import equal_groups, find_group
from quire.executor.weights.readers import Shard, Stored, TensorSource

EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""The dtypes of powers of two that are stored as their exponents (E8M0)."""

REMEDY = "Take the config.json that was written with these weights, or download the checkpoint again."
"""The remedy where a checkpoint's tensors and its configuration contradict each other."""


@dataclass(frozen=True)
class StoredLayer:
    """A layer, and the neighbouring outputs that are read.

    Attributes:
        name: the layer's; its tensors are `name.kind`.
        out_features: outputs of the whole layer.
        rows: the outputs that are read.
        dtype: the model's.
        is_symmetric: the configuration says that this layer's zero points, if there are any, are zero.
    """

    source: TensorSource
    name: str
    out_features: int
    in_features: int
    rows: range
    dtype: torch.dtype
    is_symmetric: bool = False

    @property
    def is_known(self) -> bool:
        """True if the checkpoint's tensors are known by name; otherwise any name finds a tensor."""
        return self.find("\0", Stored((), torch.uint8)) is None

    def find(self, kind: str, otherwise: Stored | None = None) -> Stored | None:
        """Finds the tensor stored as `kind`; `otherwise`, if the names are not known."""
        return self.source.find(f"{self.name}.{kind}", otherwise)

    def has(self, kind: str, dtype: torch.dtype | None = None) -> bool:
        """Returns True if there is such a tensor; False if the names are not known."""
        found = self.find(kind)
        return found is not None and dtype in (None, found.dtype)

    def shape(self, kind: str, expected: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the tensor stored as `kind`; `expected`, if there is none or the names are not known."""
        found = self.find(kind)
        return expected if found is None else found.shape

    def stored_dtype(self, kind: str, expected: torch.dtype) -> torch.dtype:
        """Returns the dtype of the tensor stored as `kind`, or else `expected`, as `shape` does."""
        found = self.find(kind)
        return expected if found is None else found.dtype

    def read(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, *, dim: int | None = 0, per: int = 1
    ) -> Tensor:
        """Reads the tensor, cut to the wanted outputs.

        Args:
            shape: of the whole tensor.
            dim: the dimension of the outputs; None: the tensor has none, and is read whole.
            per: outputs that share an index of that dimension. The first and the last may include unwanted outputs,
                which `trim` cuts off.
        """
        name = f"{self.name}.{kind}"
        if dim is None or (self.rows.start, self.rows.stop) == (0, self.out_features):
            return self.source.read(name, shape, None, dtype)
        shard = Shard(dim, self.rows.start // per, -(-self.rows.stop // per))
        return self.source.read(name, shape, shard, dtype)

    def are_zero(self, zeros: Tensor) -> bool:
        """Returns True if all zero points are zero and none need to be stored. On the meta device the configuration
        decides.
        """
        return self.is_symmetric if zeros.is_meta else not zeros.any()

    def trim(self, tensor: Tensor, dim: int, per: int) -> Tensor:
        """Cuts the result of a `read` with `per`, unpacked to an index for each output, to the wanted outputs."""
        return tensor.narrow(dim, self.rows.start % per, len(self.rows))

    def scale_dtype(self, kind: str) -> torch.dtype:
        """Chooses the dtype of scales in memory: the checkpoint's, if it is a 16-bit float, else float32."""
        stored = self.stored_dtype(kind, self.dtype)
        return stored if stored in (torch.float16, torch.bfloat16) else torch.float32

    def scales(self, kind: str = "weight_scale", block: tuple[int, int] | None = None) -> Tensor:
        """Reads scales of any granularity, [outputs, groups]. See `per_group`."""
        return self.per_group(kind, block, self.scale_dtype(kind))

    def scales_or_exponents(self, kind: str, block: tuple[int, int] | None, group: int) -> Tensor:
        """Reads scales, or powers of two stored as bytes: one a block, or a group of the format's size.

        Raises:
            ModelLoadError: bytes of other groups.
        """
        dtype = self.stored_dtype(kind, torch.float32)
        if dtype not in EXPONENTS:
            return self.scales(kind, block)
        (rows, columns), shape = block or (1, group), self.shape(kind, ())
        blocks = (-(-self.out_features // rows), -(-self.in_features // columns))
        if shape == (self.out_features, -(-self.in_features // group)):
            block = (1, group)
        elif shape != blocks:
            raise self.mismatch(kind, f"powers of two of blocks {list(blocks)}, or of groups of {group} inputs")
        return powers_of_two(self.per_group(kind, block, dtype))

    def scalar(self, kind: str) -> Tensor:
        """Reads the only element of a tensor of any shape, [] float32.

        Raises:
            ModelLoadError: there is none, or more than one.
        """
        shape = self.shape(kind, ())
        if math.prod(shape) != 1 or (self.is_known and not self.has(kind)):
            raise self.mismatch(kind, "one number")
        number = self.read(kind, shape, torch.float32, dim=None).reshape(())
        if not number.is_meta and not number.isfinite():
            raise self.mismatch(kind, f"one finite number; it is {float(number)}")
        return number

    def per_group(self, kind: str, block: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
        """Reads the value of each group of each output, [outputs, groups]. The checkpoint may have fewer.

        Args:
            block: outputs and inputs that share a value, as the configuration says. The tensor may have one for the
                layer, an output or another group instead, but no other blocks, because their size would be ambiguous.

        Raises:
            ModelLoadError: the tensor's shape is none of these.
        """
        rows, columns = block or (1, self.in_features)
        blocks = (-(-self.out_features // rows), -(-self.in_features // columns))
        shape = self.shape(kind, blocks)
        if math.prod(shape) == 1:
            return self.read(kind, shape, dtype, dim=None).reshape(1, 1).repeat(len(self.rows), 1)
        if shape[0] == self.out_features:
            num_groups = math.prod(shape[1:])
            group = self.group_size(kind, num_groups, None if block is None else columns)
            return equal_groups(
                self.read(kind, shape, dtype).reshape(len(self.rows), num_groups), self.in_features, group
            )
        if block is None or (shape[0], math.prod(shape[1:])) != blocks:
            has = "no blocks" if block is None else f"blocks of {rows} x {columns}"
            raise self.mismatch(kind, f"numbers of the layer, its outputs, groups of inputs, or blocks ({has})")
        found = self.read(kind, shape, dtype, per=rows).reshape(-1, blocks[1])
        return equal_groups(
            self.trim(found.repeat_interleave(rows, 0), 0, rows).contiguous(), self.in_features, columns
        )

    def group_size(self, kind: str, num_groups: int, expected: int | None) -> int:
        """Finds the inputs that share a value of `kind`. The last of the `num_groups` groups may have fewer.

        Args:
            expected: the configuration's group size.

        Raises:
            ModelLoadError: the layer's inputs do not divide into such groups.
        """
        group = find_group(self.in_features, num_groups, expected)
        if group is None:
            has = "no groups" if expected is None or expected < 1 else f"groups of {expected}"
            raise self.mismatch(kind, f"numbers of its outputs or of groups of inputs ({has})")
        return group

    def mismatch(self, kind: str, expected: str) -> ModelLoadError:
        """Builds the error of a tensor that does not match the configuration."""
        found = self.find(kind)
        stored = "missing" if found is None else f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        return ModelLoadError(
            f"{self.name}.{kind} of a layer with {self.out_features} outputs and {self.in_features} inputs is "
            f"{stored}, where config.json's quantization_config asks for {expected}. {REMEDY}"
        )
