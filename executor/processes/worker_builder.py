"""Finds the function that builds a worker. This file must not import torch."""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

from quire.core.config.resolved import EngineConfig
from quire.core.wire.rank import Rank


def prepare_worker(factory: str, config: EngineConfig, rank: Rank, init_method: str) -> Callable[[], Any]:
    """Does what can be done before the model is loaded, and returns the function that builds the worker.

    Args:
        factory: qualified name of a function that builds a worker from the other arguments. It may have a `prepare`,
            which takes the same, prepares the process, and returns the function. By name, so that tests and benchmarks
            of host overhead can run the real path without torch.
    """
    create_worker = pkgutil.resolve_name(factory)
    prepare = getattr(create_worker, "prepare", None)
    if prepare is None:
        return functools.partial(create_worker, config, rank, init_method)
    build: Callable[[], Any] = prepare(config, rank, init_method)
    return build
