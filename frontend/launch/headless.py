"""`quire serve --headless`: this process becomes the agent of a node that serves no HTTP."""

import os
import sys
from typing import NoReturn

import msgspec

from quire.core.config.engine_args import EngineArgs
from quire.frontend.checkpoint import model_source
from quire.frontend.launch.nodes import node_start


def become_node(args: EngineArgs) -> NoReturn:
    """Finds the checkpoint, and replaces this process by the agent, which keeps its process id.

    Raises:
        ConfigError: the options or the checkpoint are wrong.
    """
    folder = model_source.find_model(args.model, args.load)
    start = node_start(args.parallel, folder, args.observability.logging)
    fd = os.memfd_create("quire-node")
    with open(fd, "wb", closefd=False) as file:
        file.write(msgspec.msgpack.encode(start))
    os.set_inheritable(fd, True)
    command = [sys.executable, "-P", "-m", "quire.executor.processes.node_process", str(fd)]
    os.execv(sys.executable, command)
