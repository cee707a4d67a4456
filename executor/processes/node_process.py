"""Main of a headless node with workers: `python -m quire.executor.processes.node_process FD`.

`quire serve --headless` becomes this process.

FD is a memfd with a `NodeStart`.
"""

import sys

import msgspec
import uvloop

from quire.core.cluster.messages import NodeStart
from quire.core.cluster.node import Node
from quire.core.errors import ConfigError
from quire.core.logging import configure, get_logger
from quire.executor.processes.node_workers import NodeWorkers

logger = get_logger(__name__)

FAILED = 1


def main(fd: int) -> int:
    """Reads the `NodeStart` from `fd` and runs the node. Returns the exit code."""
    with open(fd, "rb") as file:
        file.seek(0)
        start = msgspec.msgpack.decode(file.read(), type=NodeStart)
    configure(f"node-{start.facts.ranks[0]}", start.logging)
    try:
        uvloop.run(_run(start))
    except ConfigError as error:
        logger.error("%s", error)
        return FAILED
    return 0


async def _run(start: NodeStart) -> None:
    await Node(start, NodeWorkers).run_until_signal()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
