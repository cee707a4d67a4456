"""A worker without a model that has a process of its own, which outlives it."""

import subprocess

from quire.core.config.resolved import EngineConfig
from quire.core.wire.rank import Rank
from quire.executor.processes.null_worker import NullWorker


def make(config: EngineConfig, rank: Rank, init_method: str) -> NullWorker:
    """Called by name."""
    subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return NullWorker(config, rank, init_method)
