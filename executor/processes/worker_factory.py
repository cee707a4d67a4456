"""Builds the real worker of one rank. Executors name it by string, because importing it imports torch."""

import importlib
from collections.abc import Callable

from quire.core.config.resolved import EngineConfig
from quire.core.wire.rank import Rank
from quire.executor import light_torch  # noqa: F401  (before all that imports torch)
from quire.executor.parallel.groups import RankGroups
from quire.executor.parallel.lockstep import Lockstep
from quire.executor.worker import Worker, import_code


class WorkerFactory:
    """Builds workers in their processes."""

    def __call__(self, config: EngineConfig, rank: Rank, init_method: str) -> Worker:
        """Builds the worker of `rank` in its groups; returns once all ranks have joined the rendezvous at
        `init_method`."""
        groups = RankGroups.join(rank, config.layout, config.device, init_method)
        lockstep = Lockstep.join(rank, config.layout, config.device) if config.layout.shares_experts else None
        return Worker(
            config, rank, groups.tensor, stages=groups.stages, context_group=groups.context, lockstep=lockstep
        )  # fmt: skip

    def prepare(self, config: EngineConfig, rank: Rank, init_method: str) -> Callable[[], Worker]:
        """Does what a spare process can do before its turn comes: imports, and on a CPU the meeting of the ranks.
        Touches no accelerator. Returns the function that builds the worker."""
        if config.layout.world_size > 1:
            importlib.import_module("torch.distributed")
        import_code(config)
        if config.device != "cpu" or config.layout.shares_experts:
            return lambda: self(config, rank, init_method)
        worker = self(config, rank, init_method)
        return lambda: worker


create_worker = WorkerFactory()
