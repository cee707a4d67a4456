"""The scheme of GGUF files: linear layers in llama.cpp's low-bit blocks or in floats, layer by layer."""

from pathlib import Path

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.wire.gguf_table import FILE_NAME, GgufTable, read_gguf_table
from quire.executor.weights.gguf_names import GgufNames, stack_of_both, whole_stack
from quire.executor.weights.quantization import sharding
from quire.executor.weights.quantization.formats.gguf_blocks import (
    FORMATS,
    PLAIN,
    BlockFormat,
    unpack,
    with_short_scales,
)
from quire.executor.weights.quantization.log_once import log_expanded
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.quantization.unquantized import Unquantized
from quire.executor.weights.readers import Shard, TensorSource
from quire.ops.linear import LinearWeight
from quire.ops.quantized import QuantizedWeight


class Gguf:
    """Reads each layer in its tensor's format."""

    def __init__(self, table: GgufTable, names: GgufNames, dtype: torch.dtype) -> None:
        """`dtype` is the model's."""
        self._table = table
        self._names = names
        self._dtype = dtype

    @classmethod
    def of(cls, spec: ModelSpec) -> "Gguf":
        """Builds the scheme from the table of files in the folder `spec.path`.

        Raises:
            ModelLoadError: a class of Transformers is asked for; files may stack experts in another way.
        """
        if spec.implementation == "transformers":
            raise ModelLoadError(f"{spec.name}: GGUF files need --model-impl auto: drop --model-impl transformers.")
        table = read_gguf_table(Path(spec.path) / FILE_NAME)
        names = GgufNames.of(spec, table.architecture)
        return cls(table, names, getattr(torch, spec.dtype))

    def read_weight(self, source: TensorSource, part: LinearPart, in_features: int) -> LinearWeight:
        """Reads a rank's part of a layer. A block that the shard cuts is read whole."""
        name, form, shard = f"{part.name}.weight", self._format(source, part), part.shard
        shape = (part.out_features, in_features)
        if form is None:
            return source.read(name, shape, shard)
        if shard.dim == 0:
            return self._unpack(source.read(name, shape, shard, torch.uint8), form, in_features, part)
        first = shard.start // form.numbers * form.numbers
        last = -(-shard.stop // form.numbers) * form.numbers
        blocks = source.read(name, shape, Shard(1, first, last), torch.uint8)
        weight = self._unpack(blocks, form, last - first, part)
        return sharding.take_inputs(weight, shard.start - first, shard.stop - first, self._dtype, part.name)

    def _unpack(self, blocks: Tensor, form: BlockFormat, in_features: int, part: LinearPart) -> QuantizedWeight:
        """Unpacks with scales as precise as the model's activations need."""
        weight = unpack(blocks, form, in_features)
        return weight if self._dtype == torch.float32 else with_short_scales(weight, part.name)

    def read_dequantized(self, source: TensorSource, part: LinearPart, in_features: int, dtype: torch.dtype) -> Tensor:
        return Unquantized().read_dequantized(source, part, in_features, dtype)

    def read_rows(self, source: TensorSource, part: LinearPart, in_features: int) -> LinearWeight:
        return self.read_weight(source, part, in_features)

    def for_head(self, rows: LinearWeight, part: LinearPart) -> LinearWeight:
        return rows

    def _format(self, source: TensorSource, part: LinearPart) -> BlockFormat | None:
        """Returns the format of the blocks of a layer's weight; None: it is read in a float dtype."""
        stored = self._names.stored_name(f"{source.locate(part.name, part.out_features).name}.weight")
        stack, tensors = whole_stack(stored or ""), self._table.tensors
        tensor = tensors.get(stack) or tensors.get(stack_of_both(stack))
        if tensor is not None and tensor.type not in FORMATS and tensor.type not in PLAIN:
            log_expanded(self._dtype, f"as {tensor.type}")
        return None if tensor is None else FORMATS.get(tensor.type)
