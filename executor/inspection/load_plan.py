"""Plans a model's loading: parameters, bytes and pages of each rank, from the sizes in its configuration. A model that
drafts for it is counted as well.

The tensors of a quantized checkpoint are inspected, too, if its files exist, because its layers may differ.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

from quire.core.config.quantization import short_name
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.inspection import LoadPlan, RankPlan
from quire.executor.backends import bind
from quire.executor.layers.adapters import AdapterLimits
from quire.executor.layers.context import ModelContext
from quire.executor.memory.dry_build import ShapeReader, dry_build, dry_stages, held_bytes, packed_stages
from quire.executor.memory.plan import CachePlan, DeviceMemory, check_weights, device_memory
from quire.executor.memory.rank_memory import RankMemory
from quire.executor.models.base import Model, ShowsEnds
from quire.executor.models.registry import is_native
from quire.executor.models.vector_heads import build_heads
from quire.executor.parallel.context.strategy import WHOLE
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.formats import open_weights
from quire.executor.weights.packed_state import open_packed
from quire.executor.weights.packing import PackAtLoad
from quire.executor.weights.quantization.schemes import CONFIG_FIELDS, own_config
from quire.executor.weights.quantization.unquantized import Unquantized
from quire.executor.weights.readers import WeightReader

NOTHING = CachePlan(0, 0)


def plan_load(config: EngineConfig, device_bytes: int | None) -> LoadPlan:
    """Plans each rank's memory, and the pages that fit.

    Args:
        device_bytes: of a GPU, or of the RAM that the workers on a CPU share; None: of this machine.

    Raises:
        ModelLoadError: the model cannot be built at all, for another reason than a lack of memory.
    """
    size, device = config.layout.num_workers, torch.device(config.device)
    held, memories, grants, obstacles = [], [], [], []
    for rank in _built_ranks(config):
        memory = _memory(device, size, device_bytes)
        grant, obstacle = _grant(config, rank.memory, memory)
        held.append(rank)
        memories.append(memory)
        grants.append(grant)
        obstacles.append(obstacle)
    last = held[-1]
    _check_heads(config, last)
    return LoadPlan(
        is_native=is_native(last.model),
        num_parameters=_num_parameters(config, last.context),
        ranks=[_rank_plan(rank.memory, memory) for rank, memory in zip(held, memories, strict=True)],
        kv_groups=held[0].memory.groups,
        num_pages=min(grant.num_pages for grant in grants),
        max_model_len=min(grant.max_model_len for grant in grants),
        obstacle=next(filter(None, obstacles), None),
        quantization=last.quantization,
    )


def find_obstacles(config: EngineConfig, memories: Sequence[Sequence[DeviceMemory]]) -> list[list[str | None]]:
    """Explains why each rank of an engine does not fit into each of the given devices; None if it does.

    Raises:
        ModelLoadError: as `plan_load`.
    """
    return [
        [_grant(config, rank.memory, memory)[1] for memory in own]
        for rank, own in zip(_built_ranks(config), memories, strict=True)
    ]


class _BuiltRank(NamedTuple):
    """A rank without its weights. `model` is the first stage's, and `quantization` the checkpoint's or the options'."""

    memory: RankMemory
    model: Model
    context: ModelContext
    quantization: str | None
    is_packed: bool


def _built_ranks(config: EngineConfig) -> Iterator[_BuiltRank]:
    """Builds each rank of an engine, in order."""
    device, ops = torch.device(config.device), bind(config.device)
    method, _ = own_config(config.spec)
    for rank in config.layout.ranks():
        quantization = short_name(config.quantization) if method is None else method
        group = ParallelGroup(rank.tensor, config.layout.tensor)
        packed = open_packed(config, rank.tensor, ops, rank.pipeline)
        if packed is not None:
            with contextlib.closing(packed), torch.inference_mode():
                context = ModelContext.of(config, ops, group, device, packed, packed)
                stages, weights_bytes = packed_stages(config, rank, context), packed.num_bytes
                quantization = short_name(packed.quantization) or method
        else:
            with stored_tensors(config, is_quantized=method is not None) as stored, torch.inference_mode():
                reader = ShapeReader(getattr(torch, config.spec.dtype), stored)
                limits = AdapterLimits.of(config.adapters)
                context = ModelContext.of(config, ops, group, device, reader, adapters=limits)
                stages = dry_stages(config, context)
                weights_bytes = held_bytes(stages[rank.pipeline])
        draft = _built_draft(config, context, stages[rank.pipeline])
        if draft is not None:
            weights_bytes += held_bytes((stages[rank.pipeline], draft[1])) - held_bytes(stages[rank.pipeline])
        memory = RankMemory.of(config, stages, rank.pipeline, weights_bytes, ops, device, draft)
        yield _BuiltRank(memory, stages[0], context, quantization, packed is not None)


def _built_draft(config: EngineConfig, context: ModelContext, target: Model) -> tuple[EngineConfig, Model] | None:
    """Builds the model or the layers that draft for `target`, which may share its weights; None: no checkpoint does."""
    own = config.of_draft_model()
    if own is None:
        return None
    # Layers that draft go by the names of their tensors, which differ between checkpoints.
    with stored_tensors(own, is_quantized=True) as stored, torch.inference_mode():
        reader = ShapeReader(getattr(torch, own.spec.dtype), stored)
        ends = (target.embed, target.head) if isinstance(target, ShowsEnds) else None
        own_context = ModelContext.of(own, context.ops, context.group, context.device, reader)
        own_context = dataclasses.replace(own_context, target_ends=ends)
        [model] = dry_stages(own, own_context)
    return own, model


def _grant(config: EngineConfig, held: RankMemory, memory: DeviceMemory) -> tuple[CachePlan, str | None]:
    """Returns the pages that fit beside a rank's weights, and the obstacle if none fit."""
    try:
        check_weights(held.needs.weights_bytes, memory, config.spec.name)
        return held.plan(config, memory), None
    except ModelLoadError as error:
        return NOTHING, str(error)


@contextlib.contextmanager
def stored_tensors(config: EngineConfig, *, is_quantized: bool) -> Iterator[WeightReader | None]:
    """Opens the checkpoint's tensors, if they are needed and exist."""
    weights: WeightReader | None = None
    if is_quantized:
        with contextlib.suppress(ModelLoadError):
            weights = open_weights(config.spec, config.load, getattr(torch, config.spec.dtype))
    try:
        yield weights
    finally:
        if weights is not None:
            weights.close()


def _check_heads(config: EngineConfig, rank: _BuiltRank) -> None:
    """Raises ModelLoadError if the checkpoint's files are there, and lack the heads that the options ask for."""
    if config.pooling is None or rank.is_packed:
        return
    with stored_tensors(config, is_quantized=True) as stored, torch.inference_mode():
        if stored is not None:
            cpu = torch.device("cpu")
            context = ModelContext.of(config, rank.context.ops, ParallelGroup(), cpu, stored)
            build_heads(config.spec, config.pooling, context, rank.model)


def _num_parameters(config: EngineConfig, context: ModelContext) -> int:
    """Counts the elements of the weights that the model would read without quantization."""
    reader = ShapeReader(context.dtype)
    plain = {
        name: {key: value for key, value in getattr(config.spec, name).items() if key not in CONFIG_FIELDS}
        for name in ("hf_config", "config_json")
    }
    spec = msgspec.structs.replace(config.spec, **plain)
    with torch.inference_mode():
        plain_context = dataclasses.replace(
            context,
            scheme=Unquantized(),
            weights=reader,
            packing=PackAtLoad(context.ops),
            group=ParallelGroup(),
            experts=None,
            sequences=WHOLE,
        )
        dry_build(spec, plain_context, reader)
    return sum(math.prod(shape) for shape in {read.name: read.shape for read in reader.reads}.values())


def _memory(device: torch.device, size: int, device_bytes: int | None) -> DeviceMemory:
    if device_bytes is None:
        return device_memory(device, size)
    each = device_bytes if device.type == "cuda" else device_bytes // size
    return DeviceMemory(each, each)


def _rank_plan(held: RankMemory, memory: DeviceMemory) -> RankPlan:
    needs = held.needs
    return RankPlan(
        needs.weights_bytes,
        needs.workspace_bytes,
        needs.state_bytes,
        needs.page_bytes,
        memory.total_bytes,
        memory.free_bytes,
    )
