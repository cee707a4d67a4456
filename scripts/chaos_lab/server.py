"""A server for the chaos suite, and the processes that belong to it."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

START_SECONDS = 180.0
STOP_SECONDS = 60.0
_ROLES = (
    ("engine", "quire.frontend.launch.engine_main"),
    ("worker", "quire.executor.processes.worker_process"),
    ("helper", "quire.frontend.grammar.helper_process"),
    ("media", "quire.frontend.media.helper_process"),
    ("api", "quire.frontend.servers.api_server"),
)


class ServerError(Exception):
    """The server does not serve."""


class Server:
    """`quire serve` on a free port, with its log in a file.

    Args:
        arguments: of `quire serve`.
    """

    def __init__(self, arguments: list[str]) -> None:
        descriptor, name = tempfile.mkstemp(prefix="chaos-", suffix=".log")
        self.log = Path(name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", *arguments, "--host", "127.0.0.1", "--port", str(self.port)],
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C cuts the run, which ends the server in order
        )
        os.close(descriptor)
        self._family: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        self.wait_until_ready()
        return self

    def wait_until_ready(self) -> None:
        """Returns when the server answers.

        Raises:
            ServerError: it ended, or takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended with {self.process.returncode}; its log: {self.log}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                    return
            time.sleep(0.1)
        raise ServerError(f"the server was not ready in {START_SECONDS:g} s; its log: {self.log}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """Ends the server as a supervisor does; returns its exit code."""
        self._family |= set(self._descendants())
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def left_behind(self) -> list[str]:
        """Processes of the server that live after its end."""
        _, alive = psutil.wait_procs(list(self._family), timeout=5)
        return [f"{each.pid} {' '.join(each.cmdline())[:80]}" for each in alive if each.is_running()]

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The living processes by role."""
        found: dict[str, list[psutil.Process]] = {"server": [psutil.Process(self.process.pid)]}
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                words = " ".join(process.cmdline())
                role = next((role for role, module in _ROLES if module in words), None)
                if role is not None:
                    found.setdefault(role, []).append(process)
        self._family |= {process for each in found.values() for process in each}
        return found

    def _descendants(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            yield from psutil.Process(self.process.pid).children(recursive=True)

    def health(self) -> dict[str, Any]:
        """The body of /health."""
        answer = httpx.get(f"{self.url}/health", timeout=60)
        body: dict[str, Any] = answer.json() if answer.content else {}
        return {"status": answer.status_code, **body}

    def metrics(self) -> dict[str, float]:
        """Sums of the metrics over their labels."""
        found: dict[str, float] = {}
        for name, value in re.findall(
            r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", httpx.get(f"{self.url}/metrics", timeout=60).text, re.MULTILINE
        ):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def is_idle(self) -> bool:
        """True if no request runs or waits, and all pages are free or cached."""
        found = self.metrics()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return not any(found.get(name, 0.0) for name in names)
