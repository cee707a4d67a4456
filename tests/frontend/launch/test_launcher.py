"""How engine processes begin and end."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from msgspec.structs import replace

from quire.core.errors import PeerLostError
from quire.core.processes import is_ending, names_of_living
from quire.core.wire.channel import CurveKeys
from quire.frontend.launch import launcher as launcher_module
from quire.frontend.launch.engine_main import EngineStart
from quire.frontend.launch.launcher import EngineLauncher, EngineSubprocess, Listening, PrivateFolder
from tests.core.engine.null_engine import NULL_WORKER, engine_config

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def engine_main(start: EngineStart, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """An engine process, whose standard input and log are pipes."""
    with open(os.memfd_create("test-engine"), "wb", buffering=0) as file:
        file.write(msgspec.msgpack.encode(start))
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.frontend.launch.engine_main", str(file.fileno())],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[file.fileno()],
            **options,
        ) as engine:
            yield engine


def test_an_engine_ends_in_order_if_its_parent_has_ended_before_it_starts(tmp_path: Path) -> None:
    """And removes the folder that its parent left behind."""
    folder = tmp_path / "private"
    folder.mkdir()
    with subprocess.Popen(["true"]) as parent:
        pass
    start = EngineStart(engine_config(), f"ipc://{folder}/engine.sock", None, parent.pid, worker_factory=NULL_WORKER)
    with engine_main(start) as engine:
        _, log = engine.communicate(timeout=60)  # closes its input
    assert engine.returncode == 0
    assert b"Traceback" not in log
    assert not folder.exists()


def test_an_engine_ends_in_order_while_its_worker_is_busy(tmp_path: Path) -> None:
    """The interpreter's own end would stop the worker's thread within torch, which ends the process by SIGABRT."""
    start = EngineStart(
        engine_config(),
        f"ipc://{tmp_path}/engine.sock",
        None,
        os.getpid(),
        worker_factory="tests.frontend.launch.endless_worker:make",
    )
    busy = tmp_path / "busy"
    with engine_main(start, env=os.environ | {"PYTHONPATH": str(ROOT), "BUSY_FILE": str(busy)}) as engine:
        while not busy.exists():
            assert engine.poll() is None
            time.sleep(0.05)
        _, log = engine.communicate(timeout=60)
    assert engine.returncode == 0
    assert b"terminate" not in log
    assert b"is left behind" in log


@pytest.mark.parametrize("transport", ["tcp", Listening("127.0.0.2", CurveKeys.generate())], ids=["tcp", "hosts"])
def test_nobody_takes_an_engines_port_before_it_listens(transport: Literal["tcp"] | Listening) -> None:
    engine = EngineLauncher(engine_config(), transport, worker_factory=NULL_WORKER).start()
    try:
        host, _, port = engine.address.removeprefix("tcp://").partition(":")
        with pytest.raises(OSError, match="in use"):
            socket.create_server((host, int(port))).close()
    finally:
        engine.kill()
        engine.join()


class SlowlyEnding(subprocess.Popen):
    """A process that gives its memory back late: when the test sets `may_end`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.may_end = threading.Event()
        super().__init__(*args, **options)

    def wait(self, timeout: float | None = None) -> int:
        self.may_end.wait(60)
        return super().wait(timeout)

    def poll(self) -> int | None:
        return self.returncode  # None until `wait` has returned


def test_an_engine_that_reads_late_what_it_is_told_holds_up_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "late"
    late.write_text("#!/bin/sh\nexec sleep 600\n")
    late.chmod(0o755)
    config = engine_config()
    names = ["model.layers.0.mlp.gate"] * 100_000  # more than a pipe may hold that is not root's
    large = replace(config, spec=replace(config.spec, hf_config={"ignore": names}))
    monkeypatch.setattr(sys, "executable", str(late))
    engines: list[EngineSubprocess] = []
    launcher = EngineLauncher(large, worker_factory=NULL_WORKER)
    starting = threading.Thread(target=lambda: engines.append(launcher.start()), daemon=True)
    starting.start()
    starting.join(30)
    assert engines
    engines[0].kill()
    engines[0].join()
    launcher.close()


def test_killing_an_engine_holds_up_nobody_else() -> None:
    process = SlowlyEnding([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    engine = EngineSubprocess(process, "", None)
    engine.kill()
    assert process.returncode is None, "whoever kills it has waited for its end"
    process.may_end.set()
    assert asyncio.run(engine.wait()) == -signal.SIGKILL


def test_a_peer_is_not_blamed_for_the_end_of_an_engine_that_was_killed_before() -> None:
    process = SlowlyEnding([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    engine = EngineSubprocess(process, "", None)
    engine.kill()
    engine.end(PeerLostError("another one has ended."))
    process.may_end.set()
    assert asyncio.run(engine.wait()) == -signal.SIGKILL


ENDING = """
import ctypes, platform, sys, threading
threading.Thread(target=sys.stdin.read).start()
print(flush=True)
ctypes.CDLL(None).syscall(93 if platform.machine() == "aarch64" else 60, 0)  # ends this thread alone
"""


def test_a_peer_is_not_blamed_for_the_end_of_an_engine_that_the_system_is_ending() -> None:
    """As one with much memory is for seconds: it cannot be waited for yet."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    while not is_ending(process.pid):
        time.sleep(0.01)
    assert process.poll() is None
    engine = EngineSubprocess(process, "", None)
    engine.end(PeerLostError("another one has ended."))
    assert asyncio.run(engine.wait()) == -signal.SIGKILL
    process.stdout.close()


def test_closing_a_launcher_returns_when_an_engine_that_nobody_took_has_ended() -> None:
    launcher = EngineLauncher(engine_config(), worker_factory=NULL_WORKER)
    launcher.launch_ahead()
    engine = launcher._ahead
    assert engine is not None
    assert engine.pid is not None
    launcher.close()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
child.stdout.readline()
print(child.pid, flush=True)
input()
"""


def engine_with_worker(monkeypatch: pytest.MonkeyPatch) -> tuple[EngineSubprocess, int]:
    """An engine whose workers are not killed with it, and the id of its worker."""
    monkeypatch.setattr(os, "killpg", os.kill)
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        worker = int(process.stdout.readline())
    return EngineSubprocess(process, "", None), worker


def test_an_engine_is_gone_when_its_workers_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, worker = engine_with_worker(monkeypatch)

    async def scenario() -> None:
        engine.kill()
        await engine.wait()
        await engine.wait_freed(0.1)
        assert f"have not ended, and still hold their memory, devices and ports: {worker} (python" in caplog.text
        going = asyncio.create_task(engine.wait_freed(60))
        await asyncio.sleep(0.2)
        assert not going.done()
        os.kill(worker, signal.SIGKILL)
        await going

    asyncio.run(scenario())
    engine.join()
    assert caplog.text.count("have not ended") == 1


def test_whoever_joins_an_engine_waits_for_its_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, worker = engine_with_worker(monkeypatch)
    monkeypatch.setattr(launcher_module, "JOIN_SECONDS", 0.5)
    engine.kill()
    engine.join()
    assert f"{worker} (python" in caplog.text
    monkeypatch.setattr(launcher_module, "JOIN_SECONDS", 60)
    threading.Timer(0.5, os.kill, (worker, signal.SIGKILL)).start()
    engine.join()
    assert names_of_living(engine.pid or 0) == []
    assert caplog.text.count("have not ended") == 1


def test_folders_of_processes_that_were_killed_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no folder of a process that lives, nor one of somebody else's."""
    monkeypatch.setenv("QUIRE_RPC_BASE_PATH", str(tmp_path))
    make = "import os, sys, time; from quire.frontend.launch.launcher import PrivateFolder; folder = PrivateFolder()"
    script = f"{make}; print(folder.path, flush=True); time.sleep(1000)"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        abandoned = Path(killed.stdout.readline().strip())
        mine = PrivateFolder()
        (tmp_path / "quire-of-somebody-else").mkdir()
        assert abandoned.exists()
        killed.kill()
        killed.wait()
    other = PrivateFolder()
    assert sorted(tmp_path.iterdir()) == sorted(
        [Path(mine.path), Path(other.path), tmp_path / "quire-of-somebody-else"]
    )
    mine.remove()
    other.remove()
