"""A Ray actor that runs one headless node in a separate process.

That process is `quire serve --headless` in all but its start: it joins node 0 over Quire's own sockets with the join
token. Ray carries its options and the token to it, and nothing else.
"""

import ctypes
import os
import signal
import subprocess
import sys

import msgspec

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import QuireError
from quire.core.logging import configure

_PR_SET_PDEATHSIG = 1


class NodeActor:
    """Made by Ray on the node's host.

    Args:
        message: the node's `EngineArgs`.
        secret: the join token.
    """

    def __init__(self, message: bytes, secret: str) -> None:
        self._message = message
        self._secret = secret

    def run(self) -> int:
        """Returns the exit code of the node's process, which is killed when the actor dies."""
        environment = os.environ | {"QUIRE_JOIN_TOKEN": self._secret}
        command = [sys.executable, "-P", "-m", "quire.frontend.launch.ray_actor", str(os.getpid())]
        return subprocess.run(command, input=self._message, env=environment).returncode


def main() -> None:
    """The node's process: reads its options, then becomes the node."""
    from quire.frontend.launch.headless import run_node  # imported here: an actor needs none of it

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # holds for what this process becomes, too
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the actor is gone")
    args = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineArgs)
    configure("node", args.observability.logging)
    try:
        run_node(args)
    except QuireError as error:
        sys.exit(f"quire: {error}")


if __name__ == "__main__":
    main()
