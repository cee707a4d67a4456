"""OpenAI's own client for JavaScript against the demo model; `scripts/setup dev` installs it where there is an npm."""

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
    """The program, where there is one that can run the client."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("there is no node on this machine")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < LEAST_NODE:
        pytest.skip(f"node is {version}, and the client needs {LEAST_NODE} or newer")
    missing = [name for name in ("openai", "zod") if not (FOLDER / "node_modules" / name).is_dir()]
    if missing:
        pytest.skip(f"npm packages are missing ({', '.join(missing)}): run scripts/setup dev where there is an npm")
    return program


def test_openai_for_javascript(node: str, demo_server: ServerProcess) -> None:
    """Completions, chat, streams, tools, parsed outputs and responses; Node starts once for all checks."""
    done = subprocess.run(
        [node, "--test-reporter=tap", "--test-reporter-destination=stdout", "openai_client.mjs"],
        cwd=FOLDER,
        env=os.environ | {"QUIRE_URL": demo_server.base_url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^# pass [1-9]", done.stdout, flags=re.MULTILINE), done.stdout
