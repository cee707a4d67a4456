"""Plans a model's loading: parameters, bytes and pages of each rank, from the sizes in its configuration alone."""

import math

import torch

from quire import ops
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.inspection import LoadPlan, RankPlan
from quire.executor.layers.context import ModelContext
from quire.executor.memory.dry_build import ShapeReader, dry_build, held_bytes
from quire.executor.memory.plan import CachePlan, DeviceMemory, check_weights, device_memory
from quire.executor.memory.rank_memory import RankMemory
from quire.executor.models.registry import is_native
from quire.executor.parallel.groups import ParallelGroup

NOTHING = CachePlan(0, 0)


def plan_load(config: EngineConfig, device_bytes: int | None) -> LoadPlan:
    """What each rank would hold, and what would fit beside it.

    Args:
        device_bytes: of a GPU, or of the RAM that the workers on a CPU share; None: of this machine.

    Raises:
        ModelLoadError: the model cannot be built at all, for another reason than a lack of memory.
    """
    size, device = config.tensor_parallel_size, torch.device(config.device)
    reader = ShapeReader(getattr(torch, config.spec.dtype))
    held, memories, grants, obstacle = [], [], [], None
    for rank in range(size):
        context = ModelContext.of(config, ops.bind(config.device), ParallelGroup(rank, size), device, reader)
        with torch.inference_mode():
            model = dry_build(config.spec, context, reader)
        memory = _memory(device, size, device_bytes)
        rank_memory = RankMemory.of(config, model, held_bytes(model), context.ops, device)
        grant = NOTHING
        try:
            check_weights(rank_memory.needs.weights_bytes, memory, config.spec.name)
            grant = rank_memory.plan(config, memory)
        except ModelLoadError as error:
            obstacle = obstacle or str(error)
        held.append(rank_memory)
        memories.append(memory)
        grants.append(grant)
    return LoadPlan(
        is_native=is_native(config.spec),
        num_parameters=sum(math.prod(shape) for shape in {read.name: read.shape for read in reader.reads}.values()),
        ranks=[_rank_plan(rank, memory) for rank, memory in zip(held, memories, strict=True)],
        kv_groups=held[0].groups,
        num_pages=min(grant.num_pages for grant in grants),
        max_model_len=min(grant.max_model_len for grant in grants),
        obstacle=obstacle,
    )


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
