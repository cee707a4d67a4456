"""`quire serve --headless`: this process becomes a node that serves no HTTP."""

import os
import signal
import sys

import msgspec
import uvloop

from quire.core.config.engine_args import EngineArgs
from quire.frontend.checkpoint import model_source
from quire.frontend.launch.engine_node import EngineNode
from quire.frontend.launch.nodes import engines_node_start, node_start


def run_node(args: EngineArgs) -> None:
    """Finds the checkpoint, and serves node 0 until a signal ends this process.

    With workers of an engine, this process is replaced by their agent, which keeps its process id.

    Raises:
        ConfigError: the options or the checkpoint are wrong, or node 0 refuses this node.
    """
    folder = model_source.find_model(args.model, args.load)
    if args.parallel.data_parallel_size > 1:
        uvloop.run(EngineNode(engines_node_start(args.parallel, folder, args.observability.logging)).run())
        return
    start = node_start(args.parallel, folder, args.observability.logging)
    fd = os.memfd_create("quire-node")
    with open(fd, "wb", closefd=False) as file:
        file.write(msgspec.msgpack.encode(start))
    os.set_inheritable(fd, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))  # until the agent has its handlers
    command = [sys.executable, "-P", "-m", "quire.executor.processes.node_process", str(fd)]
    os.execv(sys.executable, command)
