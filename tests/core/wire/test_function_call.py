"""Functions as bytes: what travels with them, and how they are called."""

import subprocess
import sys
from pathlib import Path

import pytest

from quire.core.wire import function_call

FACTOR = 3


class Host:
    size = 5

    def grown(self, by: int, *, times: int = 1) -> int:
        return self.size + by * times


def scaled(host: Host) -> int:
    return host.size * FACTOR


def test_a_method_by_name_and_a_function_get_their_arguments() -> None:
    for method in ("grown", Host.grown, lambda host, by, times: host.grown(by, times=times)):
        payload = function_call.pack(method, (2,), {"times": 4})
        assert function_call.unpack(function_call.run(Host(), payload)) == 13


def test_a_function_of_a_module_that_the_worker_cannot_import_brings_its_globals(tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(function_call.pack(scaled, (), {}))
    script = (
        "import sys; from types import SimpleNamespace; from quire.core.wire import function_call as f; "
        "print(f.unpack(f.run(SimpleNamespace(size=7), open(sys.argv[1], 'rb').read())))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(tmp_path / "payload")], capture_output=True, text=True, cwd=tmp_path,
        check=False,
    )  # fmt: skip
    assert done.stdout == "21\n", done.stderr


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(AttributeError, match="shrunk"):
        function_call.run(Host(), function_call.pack("shrunk", (), {}))
