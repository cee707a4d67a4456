"""The storage of a mixture's experts in checkpoints: expert by expert, or all of a layer in fused tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.weights.quantization import sharding
from quire.executor.weights.quantization.four_bit_floats import MX_GROUP, mxfp4
from quire.executor.weights.quantization.per_layer import check_mxfp4
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard, Stored, StoredRows, TensorSource
from quire.ops.experts import ExpertWeights
from quire.ops.quantized import QuantizedWeight


class StoredExperts(Protocol):
    """A way to store the experts of a layer."""

    @property
    def mixture(self) -> str:
        """The name of all experts together."""
        ...

    @property
    def is_interleaved(self) -> bool:
        """Gates and ups alternate."""
        ...

    def parts(self, shape: ExpertShape, index: int, shard: Shard) -> tuple[list[LinearPart], LinearPart]:
        """Returns one expert's layers: gates and ups, or ups alone, and the layer after them."""
        ...

    def read(self, context: ModelContext, shape: ExpertShape, index: int, shard: Shard) -> ExpertWeights:
        """Reads the rank's part of one expert; `shard` are its intermediate dimensions."""
        ...


@dataclass(frozen=True)
class SeparateExperts:
    """Three tensors for each expert, or two without a `gate`. `name` is an expert's, with `{}` for its index.

    If `has_bias`, each has a bias, too.
    """

    name: str
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    has_bias: bool = False

    @property
    def mixture(self) -> str:
        return _mixture(self.name) if "{}" in self.name else ""

    @property
    def is_interleaved(self) -> bool:
        return False

    def parts(self, shape: ExpertShape, index: int, shard: Shard) -> tuple[list[LinearPart], LinearPart]:
        name = self.name.format(index)
        first = [f"{name}.{part}" for part in (self.gate, self.up) if part is not None]
        return _parts(first, f"{name}.{self.down}", self.mixture, shape, shard)

    def read(self, context: ModelContext, shape: ExpertShape, index: int, shard: Shard) -> ExpertWeights:
        first, down = self.parts(shape, index, shard)
        biases = self._biases(context, shape, self.name.format(index), [f"{part.name}.bias" for part in first], shard)
        return _expert(context, context, first, down, shape, biases)

    def _biases(
        self, context: ModelContext, shape: ExpertShape, name: str, first: list[str], shard: Shard
    ) -> tuple[Tensor | None, Tensor | None]:
        if not self.has_bias:
            return None, None
        gate_up = torch.cat([context.read(part, (shape.size,), shard) for part in first])
        down = context.read(f"{name}.{self.down}.bias", (shape.hidden_size,))
        # Ranks' results are added up, so only one rank may add the bias.
        return gate_up, down if context.group.rank == 0 else torch.zeros_like(down)


@dataclass(frozen=True)
class FusedExperts:
    """Two tensors for all experts, [num_experts, 2 * size, hidden] (gates, then ups) and [num_experts, hidden, size].

    Attributes:
        is_transposed: they are [num_experts, hidden, 2 * size] and [num_experts, size, hidden] instead.
        is_interleaved: gates and ups alternate.
        has_bias: there are `gate_up`_bias [num_experts, 2 * size] and `down`_bias [num_experts, hidden].
    """

    gate_up: str
    down: str
    is_transposed: bool = False
    is_interleaved: bool = False
    has_bias: bool = False

    @property
    def mixture(self) -> str:
        return _mixture(self.gate_up, self.down)

    def parts(self, shape: ExpertShape, index: int, shard: Shard) -> tuple[list[LinearPart], LinearPart]:
        name = f"{self.mixture}.{index}"
        return _parts([f"{name}.gate_proj", f"{name}.up_proj"], f"{name}.down_proj", self.mixture, shape, shard)

    def read(self, context: ModelContext, shape: ExpertShape, index: int, shard: Shard) -> ExpertWeights:
        _, hidden_size, size = shape
        mixture = self.mixture
        gate_up = self._weight(context, self.gate_up, shape, index, (2 * size, hidden_size))
        gate, up = self._halves(gate_up)
        down = self._weight(context, self.down, shape, index, (hidden_size, size))
        own = _OneExpert({"gate": gate, "up": up, "down": down})
        return _expert(
            context,
            own,
            [LinearPart(part, size, shard, mixture) for part in ("gate", "up")],
            LinearPart("down", hidden_size, Shard(1, shard.start, shard.stop), mixture),
            shape,
            self._biases(context, shape, index, shard),
        )

    def _weight(
        self, context: ModelContext, name: str, shape: ExpertShape, index: int, size: tuple[int, int]
    ) -> Tensor:
        """Reads one expert's weight [out, in]."""
        out, inputs = size
        stored = (inputs, out) if self.is_transposed else (out, inputs)
        found = context.find(name)
        if found is not None and found.dtype.itemsize == 1:
            kind = str(found.dtype).removeprefix("torch.")
            raise ModelLoadError(
                f"{name} holds {kind} for all experts together, which is not read; take a checkpoint whose quantized "
                "experts are stored one by one."
            )
        weight = context.read(name, (shape.num_experts, *stored), Shard(0, index, index + 1))[0]
        return weight.T if self.is_transposed else weight

    def _biases(
        self, context: ModelContext, shape: ExpertShape, index: int, shard: Shard
    ) -> tuple[Tensor | None, Tensor | None]:
        if not self.has_bias:
            return None, None
        num_experts, hidden_size, size = shape
        own = Shard(0, index, index + 1)
        gate, up = self._halves(context.read(f"{self.gate_up}_bias", (num_experts, 2 * size), own)[0])
        down = context.read(f"{self.down}_bias", (num_experts, hidden_size), own)[0]
        # Ranks' results are added up, so only one rank may add the bias.
        part = slice(shard.start, shard.stop)
        return torch.cat((gate[part], up[part])), down if context.group.rank == 0 else torch.zeros_like(down)

    def _halves(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Splits [2 * size, ...] into gates and ups."""
        if self.is_interleaved:
            return rows[::2], rows[1::2]
        return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def stored_experts(context: ModelContext, name: str, *, is_transposed: bool = False) -> StoredExperts:
    """Returns the experts called `name` in the form that the checkpoint has: `FusedExperts`, or one by one."""
    fused = f"{name}.gate_up_proj"
    ending = fused.removeprefix("model.")  # the checkpoint may have any prefix
    if any(stored.endswith(ending) for stored in context.weights.shapes or ()):
        return FusedExperts(fused, f"{name}.down_proj", is_transposed)
    return SeparateExperts(f"{name}.{{}}")


@dataclass(frozen=True)
class StackedExperts:
    """Two tensors for all experts without gates, [num_experts * size, hidden] each: rows [out, in] of `up`, and rows
    [in, out] of `down`, expert by expert.
    """

    up: str
    down: str

    @property
    def mixture(self) -> str:
        return _mixture(self.up, self.down)

    @property
    def is_interleaved(self) -> bool:
        return False

    def parts(self, shape: ExpertShape, index: int, shard: Shard) -> tuple[list[LinearPart], LinearPart]:
        name = f"{self.mixture}.{index}"
        return _parts([f"{name}.up_proj"], f"{name}.down_proj", self.mixture, shape, shard)

    def read(self, context: ModelContext, shape: ExpertShape, index: int, shard: Shard) -> ExpertWeights:
        num_experts, hidden_size, size = shape
        stored, rows = (num_experts * size, hidden_size), Shard(0, index * size, (index + 1) * size)
        mixture = self.mixture
        own = _OneExpert(
            {"up": context.read(self.up, stored, rows), "down": context.read(self.down, stored, rows).T.contiguous()}
        )
        return _expert(
            context,
            own,
            [LinearPart("up", size, shard, mixture)],
            LinearPart("down", hidden_size, Shard(1, shard.start, shard.stop), mixture),
            shape,
            (None, None),
        )


class Mxfp4Experts(FusedExperts):
    """Fused MXFP4 experts, which stay quantized: `gate_up`_blocks and _scales in rows of inputs, `down` alike."""

    def read(self, context: ModelContext, shape: ExpertShape, index: int, shard: Shard) -> ExpertWeights:
        _, hidden_size, size = shape
        check_mxfp4(context.scheme, _mixture(self.gate_up, self.down))
        gate_up = self._quantized(context, self.gate_up, shape.num_experts, index, (2 * size, hidden_size))
        down = self._quantized(context, self.down, shape.num_experts, index, (hidden_size, size))
        rows = torch.arange(2 * size)
        own = torch.cat([half[shard.start : shard.stop] for half in self._halves(rows)])
        return ExpertWeights(
            gate_up.rows(own.to(context.device)),
            sharding.take_inputs(down, shard.start, shard.stop, context.dtype, self.down),
            *self._biases(context, shape, index, shard),
        )

    def _quantized(
        self, context: ModelContext, name: str, num_experts: int, index: int, size: tuple[int, int]
    ) -> QuantizedWeight:
        out, inputs = size
        if inputs % MX_GROUP:
            raise ModelLoadError(f"{name}: {inputs} inputs are no multiple of {MX_GROUP}, the group of MXFP4.")
        stored, own = (num_experts, out, inputs // MX_GROUP), Shard(0, index, index + 1)
        blocks = context.read(f"{name}_blocks", (*stored, MX_GROUP // 2), own, torch.uint8)
        return mxfp4(blocks[0].flatten(1), context.read(f"{name}_scales", stored, own, torch.uint8)[0])


def _mixture(*names: str) -> str:
    """Returns vLLM's name of all experts together: the module that contains all of theirs, with `experts`."""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    common = ".".join(one for one, *others in parts if set(others) <= {one})
    return f"{common.removesuffix('.experts')}.experts"


def _parts(
    first: list[str], down: str, mixture: str, shape: ExpertShape, shard: Shard
) -> tuple[list[LinearPart], LinearPart]:
    """Returns one expert's layers by their names."""
    inputs = Shard(1, shard.start, shard.stop)
    parts = [LinearPart(name, shape.size, shard, mixture) for name in first]
    return parts, LinearPart(down, shape.hidden_size, inputs, mixture)


def _expert(
    context: ModelContext,
    source: TensorSource,
    first: list[LinearPart],
    down: LinearPart,
    shape: ExpertShape,
    biases: tuple[Tensor | None, Tensor | None],
) -> ExpertWeights:
    """Builds an expert from the layers `first` (gate and up, or only up) and `down`."""
    read = context.scheme.read_weight
    weights = [read(source, part, shape.hidden_size) for part in first]
    gate_up, *ups = [sharding.join(weights[run], context.dtype) for run in sharding.runs(weights)]
    return ExpertWeights(gate_up, read(source, down, shape.size), *biases, *ups)


class _OneExpert:
    """Returns weights that have been read, by the names of their layers."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        weight = self._weights[name.removesuffix(".weight")]
        if shard is not None:
            weight = weight.narrow(shard.dim, shard.start, shard.stop - shard.start)
        return weight if dtype is None else weight.to(dtype)

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        weight = self._weights.get(name.removesuffix(".weight"))
        return None if weight is None else Stored(tuple(weight.shape), weight.dtype)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return StoredRows(self, layer, out_features)
