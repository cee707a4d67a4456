"""Nodes, with workers or with whole engines, that Ray starts: the process that asks Ray for them, seen from its
parent."""

import importlib.util
import subprocess
import sys

import msgspec
from msgspec import Struct

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.core.logging import LoggingConfig
from quire.frontend.launch.layout import remote_places
from quire.frontend.launch.nodes import engines_join_secret, join_secret


class RayNode(Struct, array_like=True, frozen=True):
    """A headless node's options, and its number of GPUs; 0 on CPUs."""

    args: EngineArgs
    gpus: int


class RayStart(Struct, array_like=True, frozen=True):
    """The first message on the process's standard input.

    Attributes:
        nodes: numbers 1 and up.
        secret: the join token.
        gpus: of node 0.
    """

    nodes: list[RayNode]
    secret: str
    gpus: int
    logging: LoggingConfig


class RayNodes:
    """Nodes 1 and up as Ray's actors. `ensure` starts the process that places and watches them. It ends after `close`,
    or when this process dies, and the nodes with it."""

    def __init__(self, start: RayStart) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def with_workers(cls, args: EngineArgs, *, num_workers: int, device: str) -> "RayNodes | None":
        """The nodes with workers of an engine that the options ask for; None without Ray.

        Args:
            num_workers: of the whole model.

        Raises:
            ConfigError: Ray is not installed, or there are no other nodes.
        """
        parallel = args.parallel
        if parallel.distributed_executor_backend != "ray" or parallel.headless:
            return None
        if parallel.data_parallel_backend == "ray":
            return None  # the nodes have whole engines
        _check_installed("--distributed-executor-backend")
        if parallel.nnodes == 1:
            raise ConfigError(
                "--distributed-executor-backend ray needs --nnodes, the number of Ray's nodes to use, 2 or more; "
                "on one host use mp. For engines on Ray's nodes there is --data-parallel-backend ray."
            )
        gpus = num_workers // parallel.nnodes if device == "cuda" else 0
        nodes = [RayNode(_headless(args, node_rank=rank), gpus) for rank in range(1, parallel.nnodes)]
        return cls(RayStart(nodes, join_secret(parallel), gpus, args.observability.logging))

    @classmethod
    def with_engines(cls, args: EngineArgs, *, num_workers: int, device: str) -> "RayNodes | None":
        """The nodes with the engines that this host does not run; None without Ray.

        Args:
            num_workers: of an engine.

        Raises:
            ConfigError: Ray is not installed, or there are no other engines.
        """
        parallel = args.parallel
        if parallel.data_parallel_backend != "ray" or parallel.headless:
            return None
        _check_installed("--data-parallel-backend")
        local = parallel.data_parallel_size_local
        if not local or parallel.data_parallel_start_rank or not remote_places(parallel):
            raise ConfigError(
                "--data-parallel-backend ray needs --data-parallel-size-local, the number of engines on each host, and "
                "a larger --data-parallel-size; this host runs the first ones. On one host use mp."
            )
        each = num_workers if device == "cuda" else 0
        nodes = []
        for first in range(local, parallel.data_parallel_size, local):
            number = min(local, parallel.data_parallel_size - first)
            options = _headless(args, data_parallel_start_rank=first, data_parallel_size_local=number)
            nodes.append(RayNode(options, each * number))
        return cls(RayStart(nodes, engines_join_secret(parallel), each * local, args.observability.logging))

    def ensure(self) -> None:
        """Starts the process unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.frontend.launch.ray_main"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the parent alone
        )
        message = msgspec.msgpack.encode(self._start)
        assert self._process.stdin is not None
        self._process.stdin.write(len(message).to_bytes(8, "little") + message)
        self._process.stdin.flush()

    def close(self) -> None:
        """Makes the process end, and the nodes with it, without waiting. Idempotent."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def _check_installed(flag: str) -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{flag} ray needs Ray: pip install 'quire[ray]'.")


def _headless(args: EngineArgs, **place: int) -> EngineArgs:
    """The options of a node that Ray starts, which has no Ray of its own to ask."""
    parallel = msgspec.structs.replace(
        args.parallel, headless=True, distributed_executor_backend=None, data_parallel_backend="mp", **place
    )
    return msgspec.structs.replace(args, parallel=parallel)
