"""The cut of the chaos suite that every run has: `scripts/chaos streams` for seconds instead of minutes."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.turns(2)
@pytest.mark.parametrize("layout", ["mp", "DP 2"])
def test_no_stream_is_lost_or_changed_while_processes_are_killed(checkpoint: Callable[..., Path], layout: str) -> None:
    done = subprocess.run(
        [
            ROOT / "scripts/chaos", "streams", "--model", checkpoint("llama"), "--layouts", layout, "--seconds", "30",
            "--variants", "1", "--concurrency", "4", "--pause", "10", "--faults", "kill helper,kill worker,kill engine",
        ],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = [line for line in done.stdout.splitlines() if line.startswith(f"| {layout} ")]
    _, _, streams, lost, wrong, faults, *_ = (cell.strip() for cell in row.split("|"))
    assert int(streams) > 9
    assert (lost, wrong) == ("0", "0")
    assert "kill" in faults
