"""Processes of a sweep: the server under test, and one benchmark at a time."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator

import httpx

from quire.core.errors import ConfigError, QuireError

STOP_SECONDS = 30.0
POLL_SECONDS = 0.1


def split_command(flag: str, text: str) -> list[str]:
    """The words of a command. Raises ConfigError if there is none, or if a quote is not closed."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}.") from None
    if not words:
        raise ConfigError(f"{flag} is empty.")
    return words


def run_command(command: list[str], *, show_output: bool) -> None:
    """Runs `command` to its end.

    Raises:
        QuireError: the command failed; the message has its last line on stderr.
    """
    try:
        done = subprocess.run(command, capture_output=not show_output, text=True, check=False)
    except OSError as error:
        raise QuireError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        last = (done.stderr or "").strip().splitlines()[-1:] or ["--show-stdout shows what it said"]
        raise QuireError(f"`{shlex.join(command)}` ended with {done.returncode}: {last[0]}")


@contextlib.contextmanager
def running_server(command: list[str], *, ready_seconds: float, show_output: bool) -> Iterator[None]:
    """Starts a server and waits until it is healthy; afterwards ends it with its process group.

    Raises:
        QuireError: the server ended, or was not healthy in time.
    """
    sink = None if show_output else subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    except OSError as error:
        raise QuireError(f"{command[0]}: {error.strerror}") from None
    try:
        _wait_until_healthy(process, command, ready_seconds)
        yield
    finally:
        _stop(process)


def base_url(command: list[str]) -> str:
    """The URL on which the server of `command` listens."""
    given = {"--host": "127.0.0.1", "--port": "8000"}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in given:
            given[name] = value if equals else following
    host = "127.0.0.1" if given["--host"] in ("0.0.0.0", "::") else given["--host"]
    return f"http://{host}:{given['--port']}"


def _wait_until_healthy(process: subprocess.Popen, command: list[str], seconds: float) -> None:
    url = f"{base_url(command)}/health"
    deadline = time.monotonic() + seconds
    with httpx.Client(timeout=5) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise QuireError(f"`{shlex.join(command)}` ended with {process.returncode}; --show-stdout tells why")
            with contextlib.suppress(httpx.HTTPError):
                if client.get(url).status_code == 200:
                    return
            time.sleep(POLL_SECONDS)
    raise QuireError(f"{url} was not healthy after {seconds:.0f} s (--server-ready-timeout)")


def _stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # ends the rest of its process group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
