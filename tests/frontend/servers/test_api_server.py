"""One API server, whose parent is this process."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from quire.core.engine.borrowed_engine import EngineReport
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.tally import memory_of_holdings
from quire.frontend.launch.keywords import read_keywords
from quire.frontend.launch.setup import EngineSetup
from quire.frontend.servers.messages import ServerStart, ToServer
from quire.frontend.servers.server_process import ServerProcess

DEMO_MODEL = Path(__file__).parents[3] / "quire" / "demo_model"


def launch(*news: ToServer, server: ServerConfig = ServerConfig(), import_path: list[str] = sys.path) -> int:
    """The exit code of a server that is told this."""
    setup = EngineSetup.from_args(read_keywords({"model": str(DEMO_MODEL)}), "server")
    start = ServerStart(
        *(0, setup.args, setup.config, str(setup.folder), str(setup.tokenizer_folder)),
        server=server,
        announces=False,
        greets=False,
        import_path=import_path,
        known=[],
    )

    async def scenario() -> int:
        memory = memory_of_holdings(1)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            launched = await ServerProcess.launch(start, listener, memory, {})
            for each in news:
                launched.link.send(each)
            try:
                async with asyncio.timeout(60):
                    return await launched.process.wait()
            finally:
                launched.link.close()
                if launched.process.returncode is None:
                    launched.process.kill()

    return asyncio.run(scenario())


def test_a_server_leaves_it_to_others_to_say_what_is_served_and_why_there_is_no_engine(
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = ServerConfig(enable_auto_tool_choice=True)
    assert launch(EngineReport(0, end="the weights do not fit.", is_gone=True), server=config) == 0
    log = capfd.readouterr().err
    assert "Traceback" not in log
    assert "calls of functions are read as" not in log, "another server has said the same"


def test_a_server_that_cannot_handle_what_its_parent_says_ends(capfd: pytest.CaptureFixture[str]) -> None:
    launch(EngineReport(7, waits_for="an engine that nobody has"))
    assert "IndexError" in capfd.readouterr().err


BUSY = """
import threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
class Middleware:
    def __init__(self, app): self.app = app
    async def __call__(self, *call): await self.app(*call)
"""


def test_a_server_ends_though_a_thread_is_busy(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    config = ServerConfig(middleware=["busy.Middleware"])
    assert launch(EngineReport(0, end="it ends.", is_gone=True), server=config, import_path=[str(tmp_path)]) == 0
