"""OpenAI's own libraries for JavaScript against the demo model; `scripts/setup dev` installs them with npm."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.servers import ServerProcess

FOLDER = Path(__file__).parent / "node"
LEAST_NODE = 20
"""The client's own requirement (`engines` in package.json)."""


@pytest.fixture(scope="module")
def node() -> str:
    """The program, where there is one that can run the libraries."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("there is no node on this machine")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < LEAST_NODE:
        pytest.skip(f"node is {version}, and the client needs {LEAST_NODE} or newer")
    return program


def run(node: str, program: str, server: ServerProcess, *options: str, needs: tuple[str, ...]) -> None:
    """Runs the tests in one file; Node starts once for all of them."""
    missing = [name for name in needs if not (FOLDER / "node_modules" / name).is_dir()]
    if missing:
        pytest.skip(f"npm packages are missing ({', '.join(missing)}): run scripts/setup dev where there is an npm")
    done = subprocess.run(
        [node, *options, "--test-reporter=tap", "--test-reporter-destination=stdout", program],
        cwd=FOLDER,
        env=os.environ | {"QUIRE_URL": server.base_url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^# pass [1-9]", done.stdout, flags=re.MULTILINE), done.stdout


def test_openai_for_javascript(node: str, demo_server: ServerProcess) -> None:
    """Completions, chat, streams, tools, parsed outputs and responses."""
    run(node, "openai_client.mjs", demo_server, needs=("openai", "zod"))


def test_openais_agents_for_javascript(node: str, demo_server: ServerProcess) -> None:
    """Agents with a tool, by responses and by chat, whole and streamed.

    The form of the library for browsers has no servers for tools in it, which need a package of their own.
    """
    needs = ("openai", "zod", "@openai/agents-core", "@openai/agents-openai")
    run(node, "agents_client.mjs", demo_server, "--conditions=browser", needs=needs)
