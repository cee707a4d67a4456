"""The C++ sources compile for every processor that they support, whatever this machine can run."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.ops.cpu.builds import BuildError
from quire.ops.cpu.compiler import SOURCES, find_compiler
from tests.ops.levels import LEVELS, ONLY_COMPILED, Level


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    try:
        return find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


def check(compiler: list[str], target: tuple[str, ...], files: list[Path]) -> None:
    """Checks each file without generating code; skips the test if the compiler cannot build for `target`."""
    command = [*compiler, *target, "-std=c++17", "-w", "-fsyntax-only", "-x", "c++"]
    if subprocess.run([*command, os.devnull], capture_output=True).returncode:
        pytest.skip("this compiler does not know such processors")

    def errors(file: Path) -> str:
        return subprocess.run([*command, file], capture_output=True, text=True).stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert not "".join(pool.map(errors, files))


@pytest.mark.parametrize("target", ONLY_COMPILED, ids=" ".join)
def test_sources_compile_for_processors_that_this_is_not(compiler: list[str], target: tuple[str, ...]) -> None:
    check(compiler, target, sorted(SOURCES.glob("*.cpp")))


@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[-1]], ids=lambda level: level.name)
def test_a_header_includes_what_it_uses(compiler: list[str], level: Level) -> None:
    """Checked with the fewest instructions and with all, because headers leave code out without some instructions."""
    check(compiler, level.target, sorted(SOURCES.glob("*.h")))
