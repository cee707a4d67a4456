"""Runs `quire serve --headless`: a node that serves no HTTP."""

import os
import signal
import sys

import msgspec
import uvloop

from quire.core.cluster.node import Node
from quire.core.config.engine_args import EngineArgs
from quire.core.logging import get_logger
from quire.frontend.checkpoint import model_source
from quire.frontend.launch.layout import divide_engines, hosts_of_engine
from quire.frontend.launch.node_engines import NodeEngines
from quire.frontend.launch.nodes import engines_node_start, node_start

logger = get_logger(__name__)

_OWN = {
    *("model", "revision", "code_revision", "hf_token", "load_format", "download_dir", "logging"),
    *("nnodes", "node_rank", "master_addr", "master_port", "headless", "distributed_executor_backend"),
    *("data_parallel_size", "data_parallel_size_local", "data_parallel_start_rank"),
    *("data_parallel_address", "data_parallel_rpc_port"),
}
"""Options that a headless node takes from its own command line: the checkpoint's place, node 0's, and its numbers."""


def ignored_options(args: EngineArgs) -> list[str]:
    """The flags of a headless node that node 0 decides instead, if they differ from their defaults."""
    asked, default = args.flat(), EngineArgs().flat()
    names = [name for name in asked if name not in _OWN and asked[name] != default[name]]
    return ["--" + name.replace("_", "-") for name in names]


def run_node(args: EngineArgs) -> None:
    """Finds the checkpoint, and serves node 0 until a signal ends this process.

    With workers of an engine, this process is replaced by another with the same process id.

    Raises:
        ConfigError: the options or the checkpoint are wrong, or node 0 refuses this node.
    """
    folder = model_source.find_model(args.model, args.load)
    if ignored := ignored_options(args):
        logger.info("node 0 decides what this node ignores on its own command line: %s", ", ".join(ignored))
    parallel = divide_engines(args.parallel)
    if parallel.data_parallel_size > 1 and hosts_of_engine(parallel) == 1:
        start = engines_node_start(parallel, folder, args.observability.logging)
        uvloop.run(Node(start, NodeEngines).run_until_signal())
        return
    start = node_start(parallel, folder, args.observability.logging)
    fd = os.memfd_create("quire-node")
    with open(fd, "wb", closefd=False) as file:
        file.write(msgspec.msgpack.encode(start))
    os.set_inheritable(fd, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))  # until the node has its handlers
    command = [sys.executable, "-P", "-m", "quire.executor.processes.node_process", str(fd)]
    os.execv(sys.executable, command)
