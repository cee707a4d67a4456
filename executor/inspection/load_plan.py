"""Plans a model's loading: parameters, bytes and pages of each rank, from the sizes in its configuration.

The tensors of a quantised checkpoint are looked at, too, where its files are there: layers of it may differ.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import msgspec
import torch

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.inspection import LoadPlan, RankPlan
from quire.executor.backends import bind
from quire.executor.layers.context import ModelContext
from quire.executor.memory.dry_build import ShapeReader, dry_build, dry_stages, held_bytes, packed_stages
from quire.executor.memory.plan import CachePlan, DeviceMemory, check_weights, device_memory
from quire.executor.memory.rank_memory import RankMemory
from quire.executor.models.registry import is_native
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.formats import open_weights
from quire.executor.weights.packed_state import open_packed
from quire.executor.weights.packing import PackAtLoad
from quire.executor.weights.quantisation.schemes import CONFIG_FIELDS, own_config
from quire.executor.weights.quantisation.unquantised import Unquantised
from quire.executor.weights.readers import WeightReader

NOTHING = CachePlan(0, 0)


def plan_load(config: EngineConfig, device_bytes: int | None) -> LoadPlan:
    """What each rank would hold, and what would fit beside it.

    Args:
        device_bytes: of a GPU, or of the RAM that the workers on a CPU share; None: of this machine.

    Raises:
        ModelLoadError: the model cannot be built at all, for another reason than a lack of memory.
    """
    size, device = config.layout.num_workers, torch.device(config.device)
    method, _ = own_config(config.spec)
    held, memories, grants, obstacle = [], [], [], None
    quantization, ops = config.quantization if method is None else method, bind(config.device)
    for rank in config.layout.ranks():
        group = ParallelGroup(rank.tensor, config.layout.tensor)
        packed = open_packed(config, rank.tensor, ops, rank.pipeline)
        if packed is not None:
            with contextlib.closing(packed), torch.inference_mode():
                context = ModelContext.of(config, ops, group, device, packed, packed)
                stages, weights_bytes = packed_stages(config, rank, context), packed.num_bytes
                quantization = packed.quantization or method
        else:
            with stored_tensors(config, is_quantised=method is not None) as stored, torch.inference_mode():
                reader = ShapeReader(getattr(torch, config.spec.dtype), stored)
                context = ModelContext.of(config, ops, group, device, reader)
                stages = dry_stages(config, context)
                weights_bytes = held_bytes(stages[rank.pipeline])
        memory = _memory(device, size, device_bytes)
        rank_memory = RankMemory.of(config, stages, rank.pipeline, weights_bytes, ops, device)
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
        is_native=is_native(stages[0]),
        num_parameters=_num_parameters(config, context),
        ranks=[_rank_plan(rank, memory) for rank, memory in zip(held, memories, strict=True)],
        kv_groups=held[0].groups,
        num_pages=min(grant.num_pages for grant in grants),
        max_model_len=min(grant.max_model_len for grant in grants),
        obstacle=obstacle,
        quantization=quantization,
    )


@contextlib.contextmanager
def stored_tensors(config: EngineConfig, *, is_quantised: bool) -> Iterator[WeightReader | None]:
    """The checkpoint's tensors, if there is need to look at them and they are there."""
    weights: WeightReader | None = None
    if is_quantised:
        with contextlib.suppress(ModelLoadError):
            weights = open_weights(config.spec, config.load, getattr(torch, config.spec.dtype))
    try:
        yield weights
    finally:
        if weights is not None:
            weights.close()


def _num_parameters(config: EngineConfig, context: ModelContext) -> int:
    """Numbers in the weights that the model would read if nothing was quantised."""
    reader = ShapeReader(context.dtype)
    plain = {key: value for key, value in config.spec.hf_config.items() if key not in CONFIG_FIELDS}
    spec = msgspec.structs.replace(config.spec, hf_config=plain)
    with torch.inference_mode():
        plain_context = dataclasses.replace(
            context,
            scheme=Unquantised(),
            weights=reader,
            packing=PackAtLoad(context.ops),
            group=ParallelGroup(),
            experts=None,
            sequences=None,
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
