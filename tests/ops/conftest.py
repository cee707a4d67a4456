"""Backends for the tests of operations: the C++ kernels at every level that this machine can run, and plain torch."""

import pytest

from quire.ops import bind
from quire.ops.backend import Backend
from quire.ops.cpu import NativeBackend
from tests.ops.levels import RUNNABLE, Level


@pytest.fixture(scope="session", params=RUNNABLE, ids=lambda level: level.name)
def native(request: pytest.FixtureRequest) -> NativeBackend:
    """A processor also runs what those with fewer instructions run."""
    level: Level = request.param
    return level.backend()


@pytest.fixture(scope="session")
def own_native() -> NativeBackend:
    """The build for this processor alone, for what does not depend on its instructions."""
    return RUNNABLE[0].backend()


@pytest.fixture(scope="session", params=[*RUNNABLE, None], ids=lambda level: level.name if level else "plain torch")
def ops(request: pytest.FixtureRequest) -> Backend:
    """All implementations of the operations. What a build's kernels lack goes to plain torch, as in a server."""
    level: Level | None = request.param
    return bind("cuda") if level is None else level.backend()  # the eager backend runs on the CPU as well
