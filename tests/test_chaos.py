"""The cut of the chaos suite that every run has: `scripts/chaos streams` for seconds instead of minutes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adapters import load, random_tensors, save_adapter
from tests.image_checkpoints import write_checkpoint
from tests.tiny_whisper import write_whisper

ROOT = Path(__file__).parent.parent


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("layout", "kind"), [("mp", "adapters"), ("DP 2", "texts"), ("uni", "images"), ("uni", "sounds")]
)
def test_no_stream_is_lost_or_changed_while_processes_are_killed(
    checkpoint: Callable[..., Path], tmp_path: Path, layout: str, kind: str
) -> None:
    model, options = checkpoint("llama"), list[str | Path]()
    if kind == "adapters":
        options = ["--adapter", save_adapter(tmp_path / "adapter", random_tensors(load(model), 1))]
    elif kind == "images":
        model, options = write_checkpoint(tmp_path / "llava", "llava"), ["--media", "images", "--long", "200"]
    elif kind == "sounds":
        model, options = tmp_path, ["--media", "sounds"]
        write_whisper(tmp_path)
    done = subprocess.run(
        [
            ROOT / "scripts/chaos", "streams", "--model", model, "--layouts", layout, "--seconds", "30", *options,
            "--variants", "1", "--concurrency", "4", "--pause", "10",
            "--faults", "kill helper,kill media helper,kill worker,kill engine",
        ],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = [line for line in done.stdout.splitlines() if line.startswith(f"| {layout} ")]
    _, _, streams, lost, wrong, faults, *_ = (cell.strip() for cell in row.split("|"))
    assert int(streams) >= (3 if kind == "sounds" else 9)
    assert (lost, wrong) == ("0", "0")
    assert "kill" in faults


CUT = """
import asyncio, os, signal
from cut import exit_code, run_until_cut

async def work():
    for number in range(3):
        counts.append(number)
        if number == 1:
            os.kill(os.getpid(), signal.{name})
        await asyncio.sleep(0 if number == 0 else 30)

counts = []
cut = run_until_cut(work())
print(counts)
raise SystemExit(exit_code(cut, is_clean={is_clean}))
"""


@pytest.mark.parametrize(
    ("name", "is_clean", "code"), [("SIGINT", True, 130), ("SIGTERM", True, 143), ("SIGINT", False, 1)]
)
def test_a_run_that_is_cut_keeps_its_counts(name: str, is_clean: bool, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CUT.format(name=name, is_clean=is_clean)],
        cwd=ROOT / "scripts/chaos_lab", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("[0, 1]\n", code), done.stderr
