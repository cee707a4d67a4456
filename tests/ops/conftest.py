"""Backends for the tests of operations: the C++ kernels at each level that this machine can run, and plain torch."""

import pytest

from quire.ops import bind
from quire.ops.backend import Backend
from quire.ops.cpu import NativeBackend
from tests.ops.levels import RUNNABLE, Level


@pytest.fixture(scope="session", params=RUNNABLE, ids=lambda level: level.name)
def native(request: pytest.FixtureRequest) -> NativeBackend:
    """The C++ kernels at each level: a processor can run the builds for fewer instructions, too."""
    level: Level = request.param
    return level.backend()


@pytest.fixture(scope="session")
def own_native() -> NativeBackend:
    """The build for this processor, for tests that do not depend on its instructions."""
    return RUNNABLE[0].backend()


@pytest.fixture(scope="session", params=[*RUNNABLE, None], ids=lambda level: level.name if level else "plain torch")
def ops(request: pytest.FixtureRequest) -> Backend:
    """All implementations of the operations. As in a server, plain torch runs calls that the kernels do not cover."""
    level: Level | None = request.param
    return bind("cuda") if level is None else level.backend()  # the eager backend also runs on the CPU
