"""The memory of one rank: how its pages and states lie, what it holds beside them, and how many pages fit."""

from dataclasses import dataclass

import torch

from quire.core.config.resolved import EngineConfig
from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.memory.kv_dtypes import layer_dtypes
from quire.executor.memory.kv_layout import KVLayout
from quire.executor.memory.plan import CachePlan, DeviceMemory, MemoryNeeds, RequestPages, plan_cache, workspace_bytes
from quire.executor.memory.state_layout import StateLayout, StatePages
from quire.executor.models.base import Model
from quire.ops.backend import Backend


@dataclass(frozen=True)
class RankMemory:
    """How one rank's states and pages lie in memory, the KV groups that they serve, and the bytes that it needs."""

    states: StateLayout
    pages: KVLayout | StatePages
    groups: list[KVGroupSpec]
    needs: MemoryNeeds

    @classmethod
    def of(
        cls, config: EngineConfig, model: Model, weights_bytes: int, ops: Backend, device: torch.device
    ) -> "RankMemory":
        """The memory of a rank that runs `model`, which may be a dry one."""
        spec, limits = config.spec, config.limits
        states = StateLayout(model.state_layers, device)
        pages: KVLayout | StatePages = StatePages(states.state_bytes, device)
        if model.kv_layers:
            dtypes = layer_dtypes(config.cache, model.kv_layers, getattr(torch, spec.dtype))
            pages = KVLayout(model.kv_layers, ops, block_size=limits.block_size, dtypes=dtypes, device=device)
        groups = [*pages.groups, *states.groups(pages.groups, pages.page_bytes, config.cache, limits)]
        workspace = workspace_bytes(spec, model, limits, config.max_model_len)
        return cls(states, pages, groups, MemoryNeeds(weights_bytes, workspace, pages.page_bytes, states.state_bytes))

    def plan(self, config: EngineConfig, memory: DeviceMemory) -> CachePlan:
        """The pages that fit. Raises ModelLoadError if no request of the longest length does."""
        limits = config.limits
        return plan_cache(
            config.cache,
            self.needs,
            memory,
            device=config.device,
            pages=RequestPages(self.groups, limits.block_size, limits.largest_chunk),
            max_num_seqs=limits.max_num_seqs,
            max_model_len=config.max_model_len,
            fit_max_model_len=config.fit_max_model_len,
        )
