"""One API server, whose parent is this process."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from quire.frontend.http.server_config import ServerConfig
from quire.frontend.launch.keywords import read_keywords
from quire.frontend.launch.setup import EngineSetup
from quire.frontend.servers.messages import EngineGone, EngineWaits, ServerStart, ToServer
from quire.frontend.servers.server_process import ServerProcess

DEMO_MODEL = Path(__file__).parents[3] / "quire" / "demo_model"


def launch(*news: ToServer) -> int:
    """The exit code of a server that is told this."""
    setup = EngineSetup.from_args(read_keywords({"model": str(DEMO_MODEL)}), "server")
    start = ServerStart(
        *(0, setup.args, setup.config, str(setup.folder), str(setup.tokenizer_folder)),
        server=ServerConfig(enable_auto_tool_choice=True),
        announces=False,
        greets=False,
        import_path=sys.path,
        known=[],
    )

    async def scenario() -> int:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = await ServerProcess.launch(start, listener, {})
            for each in news:
                server.link.send(each)
            async with asyncio.timeout(60):
                code = await server.process.wait()
            server.link.close()
            return code

    return asyncio.run(scenario())


def test_a_server_leaves_it_to_others_to_say_what_is_served_and_why_there_is_no_engine(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch(EngineGone(0, "the weights do not fit.")) == 0
    log = capfd.readouterr().err
    assert "Traceback" not in log
    assert "calls of functions are read as" not in log, "another server has said the same"


def test_a_server_that_cannot_handle_what_its_parent_says_ends(capfd: pytest.CaptureFixture[str]) -> None:
    launch(EngineWaits(7, "an engine that nobody has"))
    assert "IndexError" in capfd.readouterr().err
