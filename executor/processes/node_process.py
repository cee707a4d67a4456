"""Main of a headless node: `python -m quire.executor.processes.node_process FD`.

`quire serve --headless` becomes this process.

FD is a memfd with a `NodeStart`.
"""

import asyncio
import signal
import sys

import msgspec
import uvloop

from quire.core.cluster.messages import NodeStart
from quire.core.errors import ConfigError
from quire.core.logging import configure, get_logger
from quire.executor.processes.node_agent import NodeAgent

logger = get_logger(__name__)

FAILED = 1
ENDING = (signal.SIGTERM, signal.SIGINT)


def main(fd: int) -> int:
    """Reads the `NodeStart` from `fd` and runs an agent. Returns the exit code."""
    with open(fd, "rb") as file:
        file.seek(0)
        start = msgspec.msgpack.decode(file.read(), type=NodeStart)
    configure(f"node-{start.facts.ranks[0]}", start.logging)
    try:
        return uvloop.run(_run(start))
    except ConfigError as error:
        logger.error("%s", error)
        return FAILED


async def _run(start: NodeStart) -> int:
    agent = NodeAgent(start)
    loop = asyncio.get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, agent.close)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # they were blocked before the exec that started this program
    return await agent.run()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
