"""Child processes of the comparison: commands with a time limit, and servers."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from quire.frontend.bench.memory import ResidentMemory, resident_memory

STOP_SECONDS = 30.0
POLL_SECONDS = 0.01


class MeasurementError(Exception):
    """A child failed or took too long."""


def run(command: list[str], env: Mapping[str, str], limit_seconds: float, log: Path) -> str:
    """Runs `command`, and returns its output, which is also appended to `log`.

    Raises:
        MeasurementError: the command failed, or did not end in time.
    """
    with log.open("a") as file:
        file.write(f"$ {shlex.join(command)}\n")
    process = subprocess.Popen(
        command,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"{shlex.join(command)}: not done after {limit_seconds:.0f} s") from None
    finally:
        end_group(process)
    with log.open("a") as file:
        file.write(output)
    if process.returncode:
        raise MeasurementError(f"{shlex.join(command)} ended with {process.returncode}; see {log}")
    return output


def end_group(process: subprocess.Popen) -> None:
    """Ends the rest of a child's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A context manager for a server of OpenAI's API: starts it and waits until it is healthy; ends it at exit.

    Args:
        command: the server's command, without host and port.
        limit_seconds: most seconds until the server is healthy.
    """

    def __init__(self, command: list[str], env: Mapping[str, str], limit_seconds: float, log: Path) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self._env = env
        self._limit_seconds = limit_seconds
        self._log = log
        self._process: subprocess.Popen | None = None
        self._client = httpx.Client(base_url=self.base_url, timeout=limit_seconds)
        self.started_at = 0.0

    def __enter__(self) -> "Server":
        with self._log.open("a") as log:
            log.write(f"$ {shlex.join(self._command)}\n")
            log.flush()
            self.started_at = time.perf_counter()
            self._process = subprocess.Popen(
                self._command, env=os.environ | self._env, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process is not None
        self._client.close()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        end_group(self._process)

    def complete(self, max_tokens: int = 1, prompt: Sequence[int] = (1, 2, 3)) -> dict[str, Any]:
        """The answer to a prompt of token ids.

        Raises:
            MeasurementError: there was no answer.
        """
        try:
            model = self._client.get("/v1/models").json()["data"][0]["id"]
            body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True}
            return self._client.post("/v1/completions", json=body).raise_for_status().json()
        except httpx.HTTPError as error:
            raise MeasurementError(f"{shlex.join(self._command)} did not answer: {error}; see {self._log}") from None

    def resident_memory(self) -> ResidentMemory:
        """The resident memory of all of the server's processes."""
        assert self._process is not None
        return resident_memory(self._process.pid)

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        while time.perf_counter() - self.started_at < self._limit_seconds:
            if self._process.poll() is not None:
                raise MeasurementError(f"{shlex.join(self._command)} ended; see {self._log}")
            with contextlib.suppress(httpx.HTTPError):
                if self._client.get("/health").status_code == 200:
                    return
            time.sleep(POLL_SECONDS)
        raise MeasurementError(f"{shlex.join(self._command)} was not healthy after {self._limit_seconds:.0f} s")
