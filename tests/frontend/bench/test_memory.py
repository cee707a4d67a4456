"""Resident memory of a process tree."""

import subprocess
import sys
from pathlib import Path

from quire.frontend.bench.memory import checkpoint_bytes, resident_memory

MIB = 2**20
# A parent and its child: 32 MiB of bytes, and a written quarter of a 256 MiB array.
CHILD = "import numpy, sys; a = numpy.zeros(2**28, numpy.uint8); a[: 2**26] = 1; print(flush=True); sys.stdin.read()"
PARENT = f"""
import subprocess, sys
held = bytes([1]) * 2**25
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""


def test_a_tree_is_summed_and_its_cache_told_apart() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        memory = resident_memory(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert 64 * MIB <= memory.cache <= 68 * MIB
    assert 32 * MIB <= memory.beyond(0) <= 32 * MIB + 100 * MIB
    assert memory.beyond(10 * MIB) == memory.total - memory.cache - 10 * MIB


def test_mapped_weights_are_counted_as_far_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "packed.safetensors"
    path.write_bytes(bytes(64 * MIB))
    script = (
        f"import numpy, sys; a = numpy.memmap({str(path)!r}); a[: 2**25].sum(); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        memory = resident_memory(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert 32 * MIB <= memory.mapped <= 64 * MIB
    assert memory.beyond(memory.mapped) <= 100 * MIB


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 10), ("b.safetensors", 5), ("tokenizer.json", 7)):
        (tmp_path / name).write_bytes(bytes(size))
    assert checkpoint_bytes(tmp_path) == 15
