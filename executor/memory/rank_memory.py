"""The memory of one rank: the layout of its pages and states, its other needs, and the number of pages that fit."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.errors import NoMemoryError
from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.layers.step_context import LayerCache
from quire.executor.memory.kv_dtypes import layer_dtypes
from quire.executor.memory.kv_layout import KVLayout
from quire.executor.memory.plan import (
    CachePlan,
    DeviceMemory,
    MemoryNeeds,
    RequestPages,
    describe,
    graph_bytes,
    longest_row_bytes,
    plan_cache,
    workspace_bytes,
)
from quire.executor.memory.stage_groups import group_numbers, join_stages
from quire.executor.memory.state_layout import StateLayout, StatePages
from quire.executor.models.base import Model
from quire.ops.backend import Backend


@dataclass(frozen=True)
class RankMemory:
    """The layout of one rank's states and pages, and the bytes that it needs.

    Attributes:
        groups: the KV groups of the whole model, on all pipeline stages.
    """

    states: StateLayout
    pages: KVLayout | StatePages
    groups: list[KVGroupSpec]
    needs: MemoryNeeds

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        stages: Sequence[Model],
        stage: int,
        weights_bytes: int,
        ops: Backend,
        device: torch.device,
        companion: tuple[EngineConfig, Model] | None = None,
    ) -> "RankMemory":
        """Computes the memory of a rank that runs `stages[stage]`. These are all ranks' models, which may be dry
        builds.

        A `companion` is a model that runs beside the only stage, with its own configuration. Its layers follow the
        model's in the pages.
        """
        model, spec, limits = stages[stage], config.spec, config.limits
        layouts = _layouts(config, stages, ops, device, companion)
        groups = join_stages([_groups(config, layouts, states, pages) for states, pages in layouts])
        states, pages = layouts[stage]
        row = longest_row_bytes(spec, model, config.max_model_len)
        scratch = ops.scratch_bytes(device, row, is_quantized=isinstance(pages, KVLayout) and pages.is_quantized)
        drafts, towers = config.speculation is not None, config.plans_towers
        workspace = workspace_bytes(spec, model, limits, scratch, checks_drafts=drafts, counts_towers=towers)
        if companion is not None:  # the two run in turns
            other = companion[0]
            row = longest_row_bytes(other.spec, companion[1], config.max_model_len)
            scratch = ops.scratch_bytes(device, row, is_quantized=isinstance(pages, KVLayout) and pages.is_quantized)
            workspace = max(workspace, workspace_bytes(other.spec, companion[1], limits, scratch))
        workspace += graph_bytes(spec, model, config, ops.recording_rules)
        return cls(states, pages, groups, MemoryNeeds(weights_bytes, workspace, pages.page_bytes, states.state_bytes))

    @property
    def num_block_tables(self) -> int:
        """The number of a request's block tables."""
        return sum(group.has_block_table for group in self.groups)

    @property
    def num_cross_groups(self) -> int:
        """The number of lists of pages with a request's encoder input."""
        return sum(group.is_cross for group in self.groups)

    def allocate_pages(self, num_pages: int) -> tuple[list[Tensor], list[LayerCache]]:
        """Allocates by `KVLayout.allocate`; the caches' groups are those of the whole model.

        Raises:
            NoMemoryError: memory that was planned has been taken meanwhile.
        """
        try:
            tensors, caches = self.pages.allocate(num_pages)
        except torch.OutOfMemoryError:
            size = describe(num_pages * self.pages.page_bytes)
            raise NoMemoryError(
                f"The KV cache of {size} no longer fits on the device: another process took memory since it was "
                "planned. Start again, or lower --gpu-memory-utilization."
            ) from None
        numbers = group_numbers(self.pages.groups, self.groups)
        return tensors, [cache._replace(group=numbers[cache.group]) for cache in caches]

    def plan(self, config: EngineConfig, memory: DeviceMemory) -> CachePlan:
        """Plans the pages that fit. Raises ModelLoadError if no request of the longest length does."""
        limits = config.limits
        return plan_cache(
            config.cache,
            self.needs,
            memory,
            device=config.device,
            pages=RequestPages(self.groups, limits.block_size, limits.largest_chunk, limits.num_lookahead_tokens),
            max_num_seqs=limits.max_num_seqs,
            max_model_len=config.max_model_len,
            fit_max_model_len=config.fit_max_model_len,
        )


_Layouts = list[tuple[StateLayout, KVLayout | StatePages]]


def _layouts(
    config: EngineConfig,
    stages: Sequence[Model],
    ops: Backend,
    device: torch.device,
    companion: tuple[EngineConfig, Model] | None,
) -> _Layouts:
    """Lays out the states and pages of each stage. A `companion`'s layers follow those of the only stage."""
    by_stage = [list(model.kv_layers) for model in stages]
    chosen = layer_dtypes(config, [layer for layers in by_stage for layer in layers])
    if companion is not None:
        [own] = by_stage
        other, model = companion
        own += model.kv_layers
        chosen += layer_dtypes(other, model.kv_layers)
    dtypes = iter(chosen)
    paged = [
        KVLayout(
            layers,
            ops,
            block_size=config.page_slots,
            dtypes=list(itertools.islice(dtypes, len(layers))),
            device=device,
            encoder_rows=None if config.spec.encoder is None else config.spec.encoder.max_rows,
        )
        if layers
        else None
        for layers in by_stage
    ]
    most = max((pages.page_bytes for pages in paged if pages is not None), default=0)
    layouts: _Layouts = []
    for model, pages in zip(stages, paged, strict=True):
        states = StateLayout(model.state_layers, device)
        # Pages have the size of those in stages with keys and values. A stage without caches has
        # pages in name only.
        page_bytes = (most or states.state_bytes) if states.state_bytes else 1
        layouts.append((states, pages or StatePages(page_bytes, device)))
    return layouts


def _groups(
    config: EngineConfig, layouts: _Layouts, states: StateLayout, pages: KVLayout | StatePages
) -> list[KVGroupSpec]:
    """Returns one stage's groups. Raises ModelLoadError for options about states if no stage has any."""
    recurrent: list[KVGroupSpec] = []
    if states.state_bytes or not any(other.state_bytes for other, _ in layouts):
        recurrent = states.groups(pages.groups, pages.page_bytes, config.cache, config.limits)
    return [*pages.groups, *recurrent]
