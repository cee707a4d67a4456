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


def test_a_misspelt_name_is_pointed_out(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPASE", "1")
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)  # another test may have set logging up
    EngineSetup.from_args(EngineArgs.from_flat(model=str(checkpoint())), "llm")
    assert "QUIRE_CPU_KVCACHE_SPASE; did you mean QUIRE_CPU_KVCACHE_SPACE?" in caplog.text


def test_a_place_for_sockets_that_does_not_exist_is_refused(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_RPC_BASE_PATH", "/no/such/folder")
    setup = EngineSetup.from_args(EngineArgs.from_flat(model=str(checkpoint())), "llm")
    with pytest.raises(ConfigError, match=r"'/no/such/folder', which cannot be made.*QUIRE_RPC_BASE_PATH"):
        setup.launcher.launch_ahead()
