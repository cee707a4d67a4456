"""Builds the real worker of one rank. Executors name it by string, because importing it imports torch."""

from quire.core.config.resolved import EngineConfig
from quire.core.wire.rank import Rank
from quire.executor import light_torch  # noqa: F401  (before all that imports torch)
from quire.executor.parallel.groups import RankGroups
from quire.executor.parallel.lockstep import Lockstep
from quire.executor.worker import Worker


def create_worker(config: EngineConfig, rank: Rank, init_method: str) -> Worker:
    """Builds the worker of `rank` in its groups; returns once all ranks have joined the rendezvous at `init_method`."""
    groups = RankGroups.join(rank, config.layout, config.device, init_method)
    lockstep = Lockstep.join(rank, config.layout, config.device) if config.layout.shares_experts else None
    return Worker(
        config, rank, groups.tensor, stages=groups.stages, context_group=groups.context, lockstep=lockstep
    )  # fmt: skip
