"""`--distributed-executor-backend ray`: the process that has Ray start the other nodes, seen from its parent."""

import importlib.util
import subprocess
import sys

import msgspec
from msgspec import Struct

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.core.logging import LoggingConfig
from quire.frontend.launch.nodes import join_secret

CLOSE_SECONDS = 15.0
"""In which Ray has to end the actors; then the process is killed, and Ray ends them because their owner is gone."""


class RayStart(Struct, array_like=True, frozen=True):
    """What the process reads first from its standard input.

    Attributes:
        args: a headless node's options, with another `node_rank` on each.
        secret: the join token.
        gpus: of each node; 0 on CPUs.
    """

    args: EngineArgs
    secret: str
    num_nodes: int
    gpus: int
    logging: LoggingConfig


class RayNodes:
    """Nodes 1 and up as Ray's actors. `ensure` starts the process that places and watches them; it ends with `close`,
    or when this process dies, and the nodes with it."""

    def __init__(self, start: RayStart) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, args: EngineArgs, *, num_workers: int, device: str) -> "RayNodes | None":
        """The nodes that the options ask for; None without Ray.

        Args:
            num_workers: of the whole model.

        Raises:
            ConfigError: Ray is not installed, or there are no other nodes.
        """
        parallel = args.parallel
        if parallel.distributed_executor_backend != "ray" or parallel.headless:
            return None
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("--distributed-executor-backend ray needs Ray: pip install 'quire[ray]'.")
        if parallel.nnodes == 1:
            raise ConfigError(
                "--distributed-executor-backend ray needs --nnodes, the number of Ray's nodes to use, 2 or more; "
                "on one host use mp."
            )
        headless = msgspec.structs.replace(parallel, headless=True, distributed_executor_backend=None)
        start = RayStart(
            msgspec.structs.replace(args, parallel=headless),
            join_secret(parallel),
            parallel.nnodes,
            num_workers // parallel.nnodes if device == "cuda" else 0,
            args.observability.logging,
        )
        return cls(start)

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
        """Ends the process, and the nodes with it. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
