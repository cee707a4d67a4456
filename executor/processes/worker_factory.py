"""Builds the real worker of one rank. Executors name it by string, because importing it imports torch."""

from quire.core.config.resolved import EngineConfig
from quire.core.wire.rank import Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker


def create_worker(config: EngineConfig, rank: Rank, init_method: str) -> Worker:
    """The worker of `rank` in its tensor-parallel group; returns once all ranks have met at `init_method`."""
    group = ParallelGroup.create(rank.tensor, config.layout.tensor, config.device, init_method)
    return Worker(config, rank, group)
