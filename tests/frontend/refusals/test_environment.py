"""An engine's start checks environment variables: wrong values end it before a model is searched for."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.frontend.launch.setup import EngineSetup


@pytest.mark.parametrize(("name", "text"), [("QUIRE_LOG_STATS_INTERVAL", "often"), ("QUIRE_LOGGING_LEVEL", "LOUD")])
def test_a_wrong_value_is_told_before_anything_else(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} must be .*, got '{text}'"):
        EngineSetup.from_args(EngineArgs.from_flat(model="/no/such/folder"), "llm")


def test_variables_that_nothing_reads_are_told_in_one_line(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {
        "QUIRE_CPU_KVCACHE_SPASE": "1",
        "QUIRE_SOMETHING_ELSE": "1",
        "VLLM_TORCH_PROFILER_DIR": "/tmp",
        "VLLM_LOGGING_LEVEL": "INFO",  # read
        "VLLM_PORT": "tcp://10.0.0.1:8000",  # by Kubernetes, for a service that is called vllm
        "QUIRE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "QUIRE_PORT": "8001",
        "MY_QUIRE_SERVICE_HOST": "10.0.0.1",
        "QUIRE_CHAT_SERVICE_HOST": "10.0.0.1",
        "VLLM_USAGE_SOURCE": "production-docker-image",
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)  # another test may have set logging up
    EngineSetup.from_args(EngineArgs.from_flat(model=str(checkpoint())), "llm")
    [line] = [record.getMessage() for record in caplog.records if "environment" in record.getMessage()]
    assert line == (
        "nothing reads these environment variables: QUIRE_CPU_KVCACHE_SPASE (did you mean QUIRE_CPU_KVCACHE_SPACE?), "
        "QUIRE_PORT (use --port), QUIRE_SOMETHING_ELSE, VLLM_TORCH_PROFILER_DIR (use --profiler-config)"
    )


def test_a_place_for_sockets_that_does_not_exist_is_refused(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_RPC_BASE_PATH", "/no/such/folder")
    setup = EngineSetup.from_args(EngineArgs.from_flat(model=str(checkpoint())), "llm")
    with pytest.raises(ConfigError, match=r"'/no/such/folder', which cannot be made.*QUIRE_RPC_BASE_PATH"):
        setup.launch_ahead()
