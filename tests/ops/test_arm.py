"""The kernels on ARM under QEMU; skipped without it, or without a compiler for ARM (Debian: g++-aarch64-linux-gnu)."""

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.ops.cpu.builds import MAX_BUILD_SECONDS, KernelBuild
from quire.ops.cpu.compiler import FLAGS, SOURCES, cache_folder, version
from quire.ops.cpu.isa_levels import LEVELS, Level

COMPILER = "aarch64-linux-gnu-g++"
PROGRAM = Path(__file__).parent / "arm_kernels.cpp"


EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")

IS_TESTED = EMULATOR is not None and shutil.which(COMPILER) is not None
Built = tuple[Level, list[str], Path]
"""A level, the compiler's command for it, and the kernels that it made."""


def command_for(level: Level) -> list[str]:
    return [COMPILER, *FLAGS, "-O1", *level.flags]


def arm_build(level: Level) -> KernelBuild:
    return KernelBuild(cache_folder(), SOURCES, command_for(level), version([COMPILER]))


@pytest.fixture(params=LEVELS["aarch64"], ids=lambda level: level.name)
def built(request: pytest.FixtureRequest) -> Built:
    if not IS_TESTED:
        pytest.skip("there is no emulator, or no compiler for it")
    level: Level = request.param
    library = arm_build(level).library(max_wait_s=MAX_BUILD_SECONDS)  # a busy machine takes its time
    return level, command_for(level), library


def test_kernels_compute_on_arm_what_the_formulas_say(built: Built, tmp_path: Path) -> None:
    level, command, library = built
    program = tmp_path / "arm_kernels"
    subprocess.run([*command, f"-I{SOURCES}", str(PROGRAM), "-o", str(program), "-ldl"], check=True)
    done = subprocess.run(
        [str(EMULATOR), "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", program, library], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 36
    assert f"activations of {8 if 'asimddp' in level.needs else 32} bits: right" in lines
    assert all(": right" in line for line in lines)
