"""The backend that an executor binds."""

from typing import Any

import pytest

from quire.executor import backends
from quire.ops.triton.backend import TritonBackend


@pytest.mark.parametrize(
    ("variable", "value", "expected"), [("QUIRE", "1", True), ("VLLM", "1", True), ("QUIRE", "0", False)]
)
def test_invariance_is_asked_for_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: bool
) -> None:
    monkeypatch.setenv(f"{variable}_BATCH_INVARIANT", value)
    backend: Any = backends.bind("cuda")
    assert isinstance(backend, TritonBackend)
    assert backend._products.is_invariant is expected
