"""The C++ sources compile for every processor that they support, whatever this machine can run."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.ops.cpu.builds import BuildError
from quire.ops.cpu.compiler import SOURCES, find_compiler
from quire.ops.cpu.levels import LEVELS, Level
from tests.ops.levels import ALL, ONLY_COMPILED

ARM = ["aarch64-linux-gnu-g++"]
STRICT = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]  # a header alone uses none of its functions


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    try:
        return find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


def standard_headers(compiler: list[str], flags: tuple[str, ...], folder: Path) -> list[str]:
    """Flags that include the system's headers of all sources. GCC parses them once here, instead of for each source."""
    lines = (line for file in SOURCES.iterdir() for line in file.read_text(errors="replace").splitlines())
    header = folder / "standard.h"
    names = sorted({line.split()[1] for line in lines if line.startswith("#include <")})
    header.write_text("".join(f"#if __has_include({name})\n#include {name}\n#endif\n" for name in names))
    subprocess.run([*compiler, *flags, "-std=c++17", *STRICT, "-x", "c++-header", header, "-o", f"{header}.gch"])
    return ["-include", str(header)]


def check(compiler: list[str], flags: tuple[str, ...], files: list[Path], *more: str) -> None:
    """Checks each file without generating code; skips the test if the compiler cannot build with `flags`."""
    command = [*compiler, *flags, "-std=c++17", *STRICT, "-fsyntax-only", "-x", "c++", os.devnull]
    if shutil.which(compiler[0]) is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no compiler here knows such processors")

    def errors(file: Path) -> str:
        done = subprocess.run([*command, *more, "-include", str(file)], capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert not "".join(pool.map(errors, files))


@pytest.mark.parametrize("flags", ONLY_COMPILED, ids=" ".join)
def test_sources_compile_for_processors_that_this_is_not(
    compiler: list[str], flags: tuple[str, ...], tmp_path: Path
) -> None:
    check(compiler, flags, sorted(SOURCES.glob("*.cpp")), *standard_headers(compiler, flags, tmp_path))


@pytest.mark.parametrize("level", [LEVELS["aarch64"][0], LEVELS["aarch64"][-1]], ids=lambda level: level.name)
def test_sources_compile_for_arm(level: Level) -> None:
    check(ARM, level.flags, sorted(SOURCES.glob("*.cpp")))


@pytest.mark.parametrize("level", [ALL[0], ALL[-1]], ids=lambda level: level.name)
def test_a_header_includes_what_it_uses(compiler: list[str], level: Level) -> None:
    """Checked with the fewest instructions and with all, because headers leave code out without some instructions."""
    check(compiler, level.flags, sorted(SOURCES.glob("*.h")))
