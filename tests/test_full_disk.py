"""A server whose logs, audit log and crash records meet a full disk serves on."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers import WITHOUT_MODEL, ServerProcess
from tests.test_resilience import engine_of, wait_for

pytestmark = pytest.mark.turns(4, among="whole systems")

ASKED: dict[str, Any] = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
TO_FULL_DISK = "import os\nfull = os.open('/dev/full', os.O_WRONLY)\nos.dup2(full, 1)\nos.dup2(full, 2)\n"


def test_nothing_but_what_is_written_is_lost(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    server = ServerProcess(
        tmp_path, str(checkpoint("llama")), "--served-model-name", "tiny", "--audit-log-path", "/dev/full",
        program=("-c", TO_FULL_DISK + WITHOUT_MODEL[1]), env={"QUIRE_CACHE_ROOT": str(tmp_path / "file" / "cache")},
    ).wait_until_ready()  # fmt: skip

    def answer() -> Any:
        found = httpx.post(server.base_url + "/v1/completions", json=ASKED, timeout=60)
        assert found.status_code == 200, found.text
        return found.json()["choices"]

    before = answer()
    victim = engine_of(server)
    victim.send_signal(signal.SIGKILL)
    assert answer() == before
    wait_for(lambda: engine_of(server).pid != victim.pid)
    assert answer() == before
    assert server.stop() == 0
