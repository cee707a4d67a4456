"""Engines for tests of the server around them."""

import pytest

from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import NULL_WORKER


@pytest.fixture
def without_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of this process's engines have no model and answer at once. See `tests.servers.WITHOUT_MODEL`."""
    monkeypatch.setitem(EngineLauncher.__init__.__kwdefaults__, "worker_factory", NULL_WORKER)
