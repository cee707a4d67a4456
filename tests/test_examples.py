"""The programs of docs/examples print what they promise, and the settings there name endpoints that exist."""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from tests.servers import ServerProcess

FOLDER = Path(__file__).parent.parent / "docs/examples"
FRANCE = "What is the capital of France? -> The capital of France is Paris."
JAPAN = "What is the capital of Japan? -> The capital of Japan is Tokyo."
SUM = "What is 47 + 38? -> 47 + 38 = 70 + 15 = 85"
PRINTED = {
    "chat": [FRANCE, JAPAN],
    "streaming": ["The capital of France is Paris.", "21 tokens in, 19 tokens out"],
    "tools": ['calls get_weather {"city": "Paris"}', "It is 21 degrees and sunny in Paris."],
    "structured": ["Ben will be 43"],
    "batch": [FRANCE, SUM],
    "offline": [FRANCE, SUM, "The capital of France is Paris."],
    "asynchronous": [FRANCE, JAPAN],
    "langchain_agent": ["ai: It is 21 degrees and sunny in Paris."],
}
"""Lines that each program prints, among others."""

PACKAGES = {"langchain_agent": ("langchain", "langchain_openai")}
"""What a program needs that the suite does not install."""


def test_every_example_is_tested_and_listed() -> None:
    files = {path.name for path in FOLDER.iterdir()} - {"README.md"}
    assert {path.removesuffix(".py") for path in files if path.endswith(".py")} == set(PRINTED)
    table = (FOLDER / "README.md").read_text()
    assert [name for name in sorted(files) if f"| [{name}]({name}) |" not in table] == []


@pytest.mark.parametrize("name", PRINTED)
def test_a_program_prints_its_answers(demo_server: ServerProcess, name: str, tmp_path: Path) -> None:
    for package in PACKAGES.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        cwd=tmp_path,
        env=os.environ | {"OPENAI_BASE_URL": demo_server.base_url + "/v1", "PATH": programs},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in PRINTED[name] if line not in lines] == [], done.stdout + done.stderr


def test_settings_of_claude_code_lead_to_messages(demo_server: ServerProcess) -> None:
    """Claude Code adds /v1/messages to the base URL and sends the token as a bearer."""
    settings = json.loads((FOLDER / "claude_code.json").read_text())["env"]
    base, models = settings["ANTHROPIC_BASE_URL"], {value for name, value in settings.items() if name.endswith("MODEL")}
    assert models == {"my-model"}
    answer = httpx.post(
        base.replace("http://localhost:8000", demo_server.base_url) + "/v1/messages?beta=true",
        headers={"authorization": f"Bearer {settings['ANTHROPIC_AUTH_TOKEN']}", "anthropic-version": "2023-06-01"},
        json={"model": "quire-demo", "max_tokens": 40, "messages": [{"role": "user", "content": "Hello!"}]},
    )
    assert answer.json()["type"] == "message", answer.text


def test_settings_of_codex_lead_to_responses(demo_server: ServerProcess) -> None:
    """Codex adds the name of the wire API to the provider's URL."""
    settings = tomllib.loads((FOLDER / "codex.toml").read_text())
    provider = settings["model_providers"][settings["model_provider"]]
    answer = httpx.post(
        provider["base_url"].replace("http://localhost:8000", demo_server.base_url) + "/" + provider["wire_api"],
        json={"model": "quire-demo", "input": "Hello!", "max_output_tokens": 40},
    )
    assert answer.json()["object"] == "response", answer.text
