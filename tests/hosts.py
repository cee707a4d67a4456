"""Two hosts for tests: loopback addresses at which `quire serve` and `quire serve --headless` run."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from os import environ
from pathlib import Path
from typing import Any

import httpx

from tests.servers import START_SECONDS, ServerProcess

TOKEN = {"QUIRE_JOIN_TOKEN": "of-the-tests-" + "x" * 32}


OWN_PROCESSES = ["unshare", "--fork", "--pid", "--kill-child", "--mount-proc"]
"""Has a node see no other host's /proc, as on a host of its own. Needs root; the node ends by SIGKILL alone."""


def start_node(
    folder: Path, log: Path, *flags: str, env: dict[str, str] = TOKEN, within: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """A headless node at 127.0.0.2, which appends to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [*within, sys.executable, "-m", "quire", "serve", str(folder), "--headless", *flags],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environ | {"OMP_NUM_THREADS": "1", "QUIRE_HOST_IP": "127.0.0.2"} | env,
        )


class Hosts:
    """Node 0 at 127.0.0.1, and node 1 at 127.0.0.2 with the same checkpoint in another folder.

    Args:
        where: flags of both, which say how they find each other.
        number: flags that give node 1 its number.
        options: of node 0.
        node_first: whether node 1 is there before node 0.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        where: Sequence[str],
        number: Sequence[str],
        options: Sequence[str],
        *,
        node_first: bool = False,
    ) -> None:
        self._folder = folder
        self._copy = folder / "copy"
        self._copy.symlink_to(checkpoint)
        self._where = where
        self._number = number
        if node_first:
            self.node = self.start_node()
        self.server = ServerProcess(folder, str(checkpoint), *options, *where, env=TOKEN)
        if not node_first:
            self.node = self.start_node()

    def start_node(self, *number: str, env: dict[str, str] = TOKEN) -> subprocess.Popen[bytes]:
        """Starts a process for node 1, perhaps with another number or token."""
        return start_node(self._copy, self._folder / "node.log", *self._where, *(number or self._number), env=env)

    def node_log(self) -> str:
        """What processes for node 1 have said."""
        return (self._folder / "node.log").read_text()

    def health(self) -> dict[str, Any]:
        """The body of /health."""
        return httpx.get(self.server.base_url + "/health", timeout=30).json()

    def metrics(self, name: str) -> dict[str, float]:
        """The values of a metric by the label `engine`, whatever its other labels."""
        rows = httpx.get(self.server.base_url + "/metrics", timeout=30).text.splitlines()
        found = [row for row in rows if row.startswith(name + "{")]
        return {row.split('engine="')[1].split('"')[0]: float(row.rsplit(" ", 1)[1]) for row in found}

    def wait_for_health(self, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The body of /health once that is reached, or after as long as a start may take."""
        deadline = time.monotonic() + START_SECONDS
        while not is_reached(health := self.health()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return health

    def close(self) -> None:
        """Ends both, and checks that the node ends in order."""
        try:
            self.server.stop()
        finally:
            self.node.terminate()
            assert self.node.wait(30) == 0
