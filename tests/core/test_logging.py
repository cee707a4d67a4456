"""Logging of all processes: levels, JSON, and a configuration of the user's own."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.core.logging import REQUEST_ID, LoggingConfig, configure
from tests.servers import ServerProcess

SAY = """
import msgspec, sys
from quire.core.logging import LoggingConfig, configure, get_logger
configure("role", msgspec.json.decode(sys.argv[1], type=LoggingConfig))
for name in ("debug", "info", "error"):
    getattr(get_logger("quire.some.module"), name)("%s said", name)
"""


def said(monkeypatch: pytest.MonkeyPatch, **config: Any) -> list[str]:
    """The lines on stderr of a process that says something at levels DEBUG, INFO and ERROR."""
    for name in ("LOGGING_LEVEL", "CONFIGURE_LOGGING", "LOGGING_CONFIG_PATH"):
        monkeypatch.delenv(f"QUIRE_{name}", raising=False)
        monkeypatch.delenv(f"VLLM_{name}", raising=False)
    command = [sys.executable, "-c", SAY, json.dumps(config)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()


@pytest.mark.parametrize(("level", "num_lines"), [(None, 2), ("DEBUG", 3), ("ERROR", 1), ("CRITICAL", 0)])
def test_levels(monkeypatch: pytest.MonkeyPatch, level: str | None, num_lines: int) -> None:
    lines = said(monkeypatch, log_level=level)
    assert len(lines) == num_lines
    assert all(" role  " in line for line in lines)


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    _, line = (json.loads(line) for line in said(monkeypatch, formatter="json"))
    assert (line["levelname"], line["name"], line["processName"]) == ("ERROR", "quire.some.module", "role")
    assert line["message"] == "error said"


def test_logging_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, configure_logging=False) == ["error said"]  # Python's last resort


def write(path: Path, settings: object) -> str:
    path.write_text(json.dumps(settings))
    return str(path)


FILE = {
    "version": 1,
    "formatters": {
        "own": {"format": "%(part)s|%(levelname)s|%(message)s"},
        "json": {"class": "pythonjsonlogger.json.JsonFormatter"},
    },
    "handlers": {
        "own": {"class": "logging.StreamHandler", "formatter": "own"},
        "json": {"class": "logging.StreamHandler", "formatter": "json"},
    },
}


@pytest.mark.parametrize("name", ["vllm", "quire"])
def test_a_file_decides_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """vLLM's logger in a file is ours."""
    path = write(tmp_path / "log.json", {**FILE, "loggers": {name: {"handlers": ["own"], "level": "DEBUG"}}})
    lines = said(monkeypatch, pylogging_config_file=path, log_level="ERROR")
    assert lines == [f"role|{level.upper()}|{level} said" for level in ("debug", "info", "error")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "no JSON object"),
        ('{"loggers": {}}', "version"),
        ('{"version": 1, "handlers": {"a": {"class": "no.such.Handler"}}}', "No module named 'no'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"log\.json cannot be used: .*{why}"):
        configure("role", LoggingConfig(pylogging_config_file=str(path)))
    with pytest.raises(ConfigError, match=r"gone\.json cannot be used: .*No such file"):
        configure("role", LoggingConfig(pylogging_config_file="gone.json"))


def test_a_file_that_nobody_would_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="configure_logging"):
        configure("role", LoggingConfig(pylogging_config_file="a.json", configure_logging=False))


def test_short_options_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"logging_config": {"log_level": "INFO", "formatter": "json"}, "log_level": "DEBUG"}
    config = EngineArgs.from_flat(**options, log_config_file="log.json").observability.logging
    assert (config.log_level, config.formatter) == ("DEBUG", "json")
    assert config.pylogging_config_file == str(tmp_path / "log.json")


def test_all_processes_use_the_file(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    loggers = {"quire": {"handlers": ["own"], "level": "INFO"}, "uvicorn.access": {"handlers": ["json"]}}
    path = write(tmp_path / "log.json", {**FILE, "loggers": loggers})
    server = ServerProcess(
        tmp_path, str(checkpoint("llama")), "--distributed-executor-backend", "mp", "--logging-config",
        json.dumps({"pylogging_config_file": path}),
    ).wait_until_ready()  # fmt: skip
    server.stop()
    lines = server.logs().splitlines()
    assert any(line.startswith("serve|INFO|ready ") for line in lines)
    assert any(line.startswith("worker-tp0|INFO|weights of ") for line in lines)
    assert any("GET /health HTTP/1.1" in line and json.loads(line)["message"] for line in lines if line[0] == "{")


def line_of(capsys: pytest.CaptureFixture[str], text: object, **config: Any) -> str:
    configure("role", LoggingConfig(log_level="INFO", **config))
    logging.getLogger("quire.some.module").info("request %s", text)
    return capsys.readouterr().err


def test_a_text_of_a_client_cannot_pose_as_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    forged = "x\n12:00:00 INFO    serve  all is well\r\x1b[2Jgone\u202e"
    first, second = line_of(capsys, forged).splitlines()
    assert first.endswith("INFO    role  request x")
    assert second == "    12:00:00 INFO    serve  all is well\\r\\x1b[2Jgone\\u202e"
    assert line_of(capsys, "你好　🙂\tend").endswith("request 你好　🙂\tend\n")


def test_nor_can_that_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure("role", LoggingConfig(log_level="INFO"))
    try:
        raise ValueError("x\n12:00:00 INFO    serve  all is well")
    except ValueError:
        logging.getLogger("quire.some.module").exception("it failed")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR   role  it failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)


def test_lines_in_json_have_the_id_of_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert "request_id" not in json.loads(line_of(capsys, "x", formatter="json"))
    token = REQUEST_ID.set("r-1")
    try:
        assert json.loads(line_of(capsys, "x", formatter="json"))["request_id"] == "r-1"
    finally:
        REQUEST_ID.reset(token)


def test_the_short_option_of_the_form() -> None:
    assert EngineArgs.from_flat(log_format="json").observability.logging.formatter == "json"
    assert EngineArgs.from_flat(logging_config={"formatter": "json"}).observability.logging.formatter == "json"
