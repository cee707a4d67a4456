"""How engine processes begin and end."""

import subprocess
import sys


def test_an_engine_ends_quietly_if_its_parent_ends_before_saying_what_to_run() -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "quire.frontend.launch.engine_main"],
        input=b"\x09",
        capture_output=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
