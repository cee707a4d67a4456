"""Torch's library is loaded beside other work, before anything imports torch."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.frontend.llm import LLM

MAPPED = "'libtorch_cpu.so' in open('/proc/self/maps').read()"

LOADS = f"""
import sys
from quire.executor import torch_library
assert not {MAPPED}
torch_library.load_ahead().join()
assert {MAPPED} and "torch" not in sys.modules
import torch
assert torch.ones(2).sum() == 2
"""

NOTES = f"""
import sys, threading

def note(event, arguments):
    if event == "import" and arguments[0] == "torch":
        loading = any(thread.name == "torch library" for thread in threading.enumerate())
        with open(FILE, "a") as file:
            print(loading or {MAPPED}, sys.orig_argv, file=file)

sys.addaudithook(note)
"""
"""Of each process that imports torch: whether its library is loaded by then, or on the way."""


def test_the_library_is_loaded_without_torchs_own_code_which_finds_it_later() -> None:
    subprocess.run([sys.executable, "-c", LOADS], check=True)


def test_an_engine_that_computes_itself_loads_the_library_before_it_imports_torch(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    (tmp_path / "sitecustomize.py").write_text(NOTES.replace("FILE", repr(str(notes))))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with LLM(str(checkpoint("llama")), device="cpu"):
        pass
    first, *_ = [line for line in notes.read_text().splitlines() if "launch.engine_main" in line]
    assert first.startswith("True ")
