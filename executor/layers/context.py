"""The context in which layers are built on one rank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.executor.layers.adapters import AdapterLimits, Adapters
from quire.executor.layers.experts.parallel import ExpertParallel
from quire.executor.parallel.context.divided import context_parallel
from quire.executor.parallel.context.strategy import WHOLE, ContextParallel
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.lockstep import Lockstep
from quire.executor.weights.packing import PackAtLoad, Packing
from quire.executor.weights.quantization.cache_scheme import CacheScales
from quire.executor.weights.quantization.scheme import LinearPart, LinearScheme
from quire.executor.weights.quantization.schemes import choose_scheme
from quire.executor.weights.readers import Shard, Stored, StoredRows, TensorSource, WeightReader
from quire.ops.backend import Backend


@dataclass(frozen=True)
class ModelContext:
    """A rank's kernels, tensor-parallel group and weights. A layer reads its shard of a weight when it is built.

    Linear layers read theirs through `scheme`, and `packing` packs them. `experts` divides the experts of mixtures
    whole over ranks; None: each rank has a part of each, as of any other weight. `sequences` divides the positions of
    sequences over ranks, or not. `adapters` is the place where linear layers meet those of a step's tokens;
    None: the worker has no adapters. `cache_scales` are the checkpoint's scales of cached keys and values;
    None: its format has none. A model that does not generate is built without its language-model head. In an
    encoder, tokens see each other, and nothing is cached. If it `reads_media`, towers for images and sounds are built;
    ranks divide their layers if it `divides_towers`, and otherwise have them whole. `target_ends` are the embedding and
    the head of the model that this one drafts for; None: it drafts for none, or for one that does not show them.
    """

    ops: Backend
    group: ParallelGroup
    dtype: torch.dtype
    device: torch.device
    weights: WeightReader
    scheme: LinearScheme
    packing: Packing
    layers: range  # indices of the model's layers that this rank builds
    max_model_len: int  # tokens; NTK-scaled rotary embeddings stretch to it
    experts: ExpertParallel | None = None
    sequences: ContextParallel = WHOLE
    cache_scales: CacheScales | None = None
    adapters: Adapters | None = None
    generates: bool = True
    is_encoder: bool = False
    reads_media: bool = False
    divides_towers: bool = False
    target_ends: tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]] | None = None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        ops: Backend,
        group: ParallelGroup,
        device: torch.device,
        weights: WeightReader,
        packing: Packing | None = None,
        layers: range | None = None,
        sequences: ContextParallel | None = None,
        lockstep: Lockstep | None = None,
        adapters: AdapterLimits | None = None,
    ) -> "ModelContext":
        """Builds the context that `config` asks for; without `packing`, weights are packed as they are read.

        Without `layers`, the rank builds all. `sequences` and `lockstep` are for a model that will run, see
        `context_parallel` and `ExpertParallel.of`.

        Raises ModelLoadError for a quantization that is not supported.
        """
        spec, dtype = config.spec, getattr(torch, config.spec.dtype)
        return cls(
            ops=ops,
            group=group,
            dtype=dtype,
            device=device,
            weights=weights,
            scheme=choose_scheme(spec, config.quantization),
            packing=packing or PackAtLoad(ops),
            layers=range(spec.num_layers) if layers is None else layers,
            max_model_len=config.max_model_len,
            experts=ExpertParallel.of(config, group, lockstep),
            sequences=sequences or context_parallel(config, group),
            cache_scales=CacheScales.of(config),
            adapters=adapters and Adapters(adapters, ops, dtype, device),
            generates=config.pooling is None and not spec.is_encoder,
            is_encoder=spec.is_encoder,
            reads_media=config.reads_media,
            divides_towers=config.tower_mode == "weights",
        )

    @property
    def is_first_stage(self) -> bool:
        """True if this rank builds the first layers, and so the embedding."""
        return self.layers.start == 0

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Reads a weight or its shard, in `dtype` or else the model's, to the rank's device."""
        return self.weights.read(name, shape, shard, dtype).to(self.device)

    def read_dequantized(self, part: LinearPart, in_features: int) -> Tensor:
        """Reads a weight by `LinearScheme.read_dequantized`, in the model's dtype."""
        return self.packing.dequantized(lambda: self.scheme.read_dequantized(self, part, in_features, self.dtype))

    def read_cache_scales(self, layer: str, num_heads: int, heads: range) -> Tensor | None:
        """Reads by `CacheScales.read`; None also if the checkpoint's format has no scales."""
        return None if self.cache_scales is None else self.cache_scales.read(self, layer, num_heads, heads)

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        return self.weights.find(name, otherwise)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        rows = self.weights.locate(layer, out_features)
        return rows._replace(reader=_OnDevice(rows.reader, self.device))

    def share(self, size: int, what: str) -> int:
        """Returns this rank's part of `size`, equal on all ranks.

        Raises:
            ModelLoadError: `size` cannot be divided by the number of ranks.
        """
        if size % self.group.size:
            raise ModelLoadError(
                f"--tensor-parallel-size {self.group.size} does not divide the model's {size} {what}; "
                f"choose a divisor of {size}."
            )
        return size // self.group.size

    def shard(self, dim: int, size: int, what: str) -> Shard:
        """Returns this rank's equal part of a dimension of `size`."""
        part = self.share(size, what)
        return Shard(dim, self.group.rank * part, (self.group.rank + 1) * part)


@dataclass(frozen=True)
class _OnDevice:
    """Puts a checkpoint's tensors on the rank's device."""

    source: TensorSource
    device: torch.device

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return self.source.read(name, shape, shard, dtype).to(self.device)

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        return self.source.find(name, otherwise)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return self.source.locate(layer, out_features)
