"""One of several API servers, seen from their parent."""

import asyncio
import os
import socket
import sys

from msgspec import Struct

from quire.frontend.servers.calls import Calls
from quire.frontend.servers.messages import AskedOfServer, ControlLink, FromServer, ServerStart


class ServerProcess(Struct):
    """A running API server."""

    process: asyncio.subprocess.Process
    link: ControlLink[FromServer]
    calls: Calls
    serving_since: float | None = None  # CLOCK_MONOTONIC seconds

    @classmethod
    async def launch(
        cls, start: ServerStart, listener: socket.socket, memory: int, env: dict[str, str]
    ) -> "ServerProcess":
        """Starts a server, and sends it `start`.

        Args:
            listener: the port, from which it accepts connections.
            memory: what all servers hold, from `memory_of_holdings`.
            env: variables beside those of this process.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        fds = (theirs.fileno(), listener.fileno(), memory)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "quire.frontend.servers.api_server", *map(str, fds)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=fds,
                env=os.environ | env,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which has the servers drain
            )
        link: ControlLink[FromServer] = await ControlLink.open(ours, FromServer)
        link.send(start)
        return cls(process, link, Calls(lambda call_id, question: link.send(AskedOfServer(call_id, question))))
