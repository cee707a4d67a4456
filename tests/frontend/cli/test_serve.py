"""`quire serve` is told to stop before it is ready, and says when it is."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.hosts import TOKEN
from tests.servers import START_SECONDS, ServerProcess, free_port


def handles_sigterm(server: ServerProcess) -> bool:
    """Whether the process handles SIGTERM; before, the interpreter itself is starting, and nothing is there to end."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def has_bound(server: ServerProcess) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", server.port)) == 0


def has_engine(server: ServerProcess) -> bool:
    return bool(psutil.Process(server.process.pid).children())


def answers(server: ServerProcess) -> bool:
    try:
        return httpx.get(f"{server.base_url}/health", timeout=0.2).status_code > 0
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(
    ("moment", "flags"),
    [
        *((moment, []) for moment in (handles_sigterm, has_bound, has_engine, answers)),
        (answers, ["--data-parallel-size", "2"]),
    ],
)
def test_sigterm_ends_a_starting_server_cleanly(
    moment: Callable[[ServerProcess], bool], flags: list[str], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    server = ServerProcess(tmp_path, str(checkpoint("llama")), *flags)
    while not moment(server):
        assert server.process.poll() is None
        assert time.monotonic() - server.started_at < START_SECONDS
        time.sleep(0.001)
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop() == 0
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert "Traceback" not in server.logs()
    assert "exception" not in server.logs().lower()


TELLS = """
import gc, signal

def tell(number, frame):
    with open(FILE, "a") as file:
        print(gc.isenabled(), file=file)

signal.signal(signal.SIGUSR2, tell)
"""


def test_garbage_is_collected_while_a_server_waits_for_other_hosts(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """By the server and by its engine: the other host may not come for hours."""
    told = tmp_path / "told"
    (tmp_path / "sitecustomize.py").write_text(TELLS.replace("FILE", repr(str(told))))
    flags = ["--nnodes", "2", "--tensor-parallel-size", "2", "--master-addr", "127.0.0.1"]
    flags += ["--master-port", str(free_port())]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = ServerProcess(tmp_path, str(checkpoint("llama")), *flags, env=TOKEN | {"PYTHONPATH": path})
    try:
        while "node 1 of 2" not in waits_for(server):
            assert server.process.poll() is None, server.logs()
            assert time.monotonic() - server.started_at < START_SECONDS
            time.sleep(0.05)
        process = psutil.Process(server.process.pid)
        engines = [each for each in process.children() if "launch.engine_main" in " ".join(each.cmdline())]
        for number, each in enumerate([process, *engines], 1):
            each.send_signal(signal.SIGUSR2)
            while not told.exists() or told.read_text().count("\n") < number:
                assert time.monotonic() - server.started_at < START_SECONDS
                time.sleep(0.01)
        assert told.read_text().split() == ["True", "True"]
    finally:
        server.stop()


def waits_for(server: ServerProcess) -> str:
    try:
        return str(httpx.get(f"{server.base_url}/health", timeout=5).json()["engine"].get("waits_for"))
    except httpx.HTTPError:
        return ""


def test_the_time_to_be_ready_is_the_programs_own(tmp_path: Path) -> None:
    """A script that installs first and then turns into the server does not count."""
    late = (
        "import os, sys, time; time.sleep(2); os.execv(sys.executable, [sys.executable, '-m', 'quire', *sys.argv[1:]])"
    )
    server = ServerProcess(tmp_path, program=("-c", late)).wait_until_ready()
    seconds = time.monotonic() - server.started_at
    server.stop()
    told = re.search(r"ready +http\S+ after ([\d.]+) s", server.logs())
    assert told is not None
    assert 0.1 < float(told[1]) < seconds - 1.5
