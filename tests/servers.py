"""Real server processes for tests: starts `quire serve` on a free port, waits until it is ready, and ends it."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.core.engine.null_engine import NULL_WORKER

START_SECONDS = 120.0


def program_with(worker: str) -> tuple[str, str]:
    """A program for `ServerProcess` whose engines have the workers that a function of this name builds."""
    return (
        "-c",
        "from quire.frontend.cli.main import main\n"
        "from quire.frontend.launch.launcher import EngineLauncher\n"
        f"EngineLauncher.__init__.__kwdefaults__['worker_factory'] = {worker!r}\n"
        "main()\n",
    )


WITHOUT_MODEL = program_with(NULL_WORKER)
"""A program for `ServerProcess` whose engines have workers without a model, for tests of what is around the engines.
Such workers answer at once and start without torch, whose import takes most of a start.
"""


_PORTS = range(15_000, 32_000)
"""Below those that Linux gives to whoever asks for any: nobody else is given one before its server binds."""


def free_port() -> int:
    """A port that nobody listens at, drawn anew each time."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ServerProcess:
    """`quire serve ARGUMENTS` on its own port; logs go to a file that `logs()` reads.

    Args:
        program: Python's arguments; a test may give a script that changes something before it serves.
    """

    def __init__(
        self, folder: Path, *arguments: str, env: dict[str, str] | None = None, program: Sequence[str] = ("-m", "quire")
    ) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"server-{self.port}.log"
        self.started_at = time.monotonic()
        spare = (
            () if "--enable-warm-spare" in arguments else ("--no-enable-warm-spare",)
        )  # most tests have no use for one
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *program,
                    "serve",
                    *arguments,
                    *spare,
                    "--host",
                    "127.0.0.1",
                    "--port",
                    str(self.port),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
            )

    def wait_until_ready(self) -> "ServerProcess":
        """Returns once /health answers 200; fails with the log if the process ends or takes too long."""
        while time.monotonic() - self.started_at < START_SECONDS:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.logs()}")
            try:
                if httpx.get(f"{self.base_url}/health", timeout=10).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        self.stop()
        raise AssertionError(f"the server was not ready in {START_SECONDS:.0f} s:\n{self.logs()}")

    def logs(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self, with_signal: int = signal.SIGTERM) -> int:
        """Ends the server and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not end within 60 s:\n{self.logs()}") from None
