"""What tests of recorded steps share."""

from typing import Any

import pytest

from quire.ops.cpu import launches
from quire.ops.cpu.libraries import load_kernels


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of launches with each step that comes from a recording."""
    if load_kernels() is None:
        pytest.skip("plain torch cannot be recorded")
    counts: list[int] = []
    run = launches.Recording.run

    def counted(self: Any) -> None:
        counts.append(self._count)
        run(self)

    monkeypatch.setattr(launches.Recording, "run", counted)
    return counts
