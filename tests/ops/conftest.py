"""Backends for the tests of operations: the C++ kernels at each level that this machine can run, and plain torch."""

from pathlib import Path

import pytest

from quire.ops.backend import Backend
from quire.ops.cpu.native import NativeBackend
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from tests.ops.levels import RUNNABLE, TESTED, Level, in_turns


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The limit on a test's time leaves out its fixtures: the first test of a level waits for the kernels' build."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(func_only=True), append=False)


@pytest.fixture(scope="session", params=in_turns(TESTED), ids=lambda level: level.name)
def native(request: pytest.FixtureRequest) -> NativeBackend:
    """The C++ kernels at each level: a processor can run the builds for fewer instructions, too."""
    level: Level = request.param
    return level.backend()


@pytest.fixture(scope="session")
def own_native() -> NativeBackend:
    """The build for this processor, for tests that do not depend on its instructions."""
    return RUNNABLE[0].backend()


@pytest.fixture(
    scope="session", params=[*in_turns(TESTED), None], ids=lambda level: level.name if level else "plain torch"
)
def ops(request: pytest.FixtureRequest) -> Backend:
    """All implementations of the operations. As in a server, plain torch runs calls that the kernels do not cover."""
    level: Level | None = request.param
    return EagerBackend(PlainLinear()) if level is None else level.backend()
