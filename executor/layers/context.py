"""The context in which layers are built on one rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.quantisation.scheme import LinearScheme
from quire.executor.weights.quantisation.schemes import choose_scheme
from quire.executor.weights.readers import Shard, WeightReader
from quire.ops.backend import Backend


@dataclass(frozen=True)
class ModelContext:
    """A rank's kernels, tensor-parallel group and weights. A layer reads its shard of a weight when it is made.

    Linear layers of the model's blocks read theirs through `scheme`.
    """

    ops: Backend
    group: ParallelGroup
    dtype: torch.dtype
    device: torch.device
    weights: WeightReader
    scheme: LinearScheme
    layers: range  # indices of the model's layers that this rank builds
    max_model_len: int  # tokens; NTK-scaled rotary embeddings stretch to it

    @classmethod
    def of(
        cls, config: EngineConfig, ops: Backend, group: ParallelGroup, device: torch.device, weights: WeightReader
    ) -> "ModelContext":
        """The context that `config` asks for. Raises ModelLoadError for a quantisation that is not supported."""
        spec = config.spec
        return cls(
            ops=ops,
            group=group,
            dtype=getattr(torch, spec.dtype),
            device=device,
            weights=weights,
            scheme=choose_scheme(spec, config.quantization),
            layers=range(spec.num_layers),
            max_model_len=config.max_model_len,
        )

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A weight or its shard, in `dtype` or else the model's, on the rank's device."""
        return self.weights.read(name, shape, shard, dtype).to(self.device)

    def share(self, size: int, what: str) -> int:
        """This rank's part of `size`, equal on all ranks.

        Raises:
            ModelLoadError: `size` cannot be divided by the number of ranks.
        """
        if size % self.group.size:
            raise ModelLoadError(
                f"tensor_parallel_size {self.group.size} does not divide the model's {size} {what}; "
                f"choose a divisor of {size}."
            )
        return size // self.group.size

    def shard(self, dim: int, size: int, what: str) -> Shard:
        """This rank's equal part of a dimension of `size`."""
        part = self.share(size, what)
        return Shard(dim, self.group.rank * part, (self.group.rank + 1) * part)
