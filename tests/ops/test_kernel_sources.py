"""The C++ sources compile for every processor that they support, whatever this machine can run."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.ops.cpu.builds import BuildError, digest
from quire.ops.cpu.compiler import SOURCES, cache_folder, find_compiler, version
from quire.ops.cpu.isa_levels import LEVELS, Level
from tests.ops.levels import ALL, ONLY_COMPILED

ARM = ["aarch64-linux-gnu-g++"]
INTRINSICS = {"<immintrin.h>", "<arm_neon.h>"}
STRICT = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]  # a header alone uses none of its functions


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    try:
        return find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


def standard_headers() -> set[str]:
    """The system's headers of all sources, each in its brackets."""
    lines = (
        line
        for file in [*SOURCES.rglob("*.h"), *SOURCES.rglob("*.cpp")]
        for line in file.read_text(errors="replace").splitlines()
    )
    return {line.split()[1] for line in lines if line.startswith("#include <")}


def parsed_once(compiler: list[str], flags: tuple[str, ...], names: set[str], folder: Path) -> list[str]:
    """Flags that include headers, which GCC parses here, instead of for each file. Those that it lacks are left out."""
    header = folder / "once.h"
    header.write_text("".join(f"#if __has_include({name})\n#include {name}\n#endif\n" for name in sorted(names)))
    if shutil.which(compiler[0]):
        command = [*compiler, *flags, "-std=c++17", *STRICT, "-x", "c++-header", header, "-o", f"{header}.gch"]
        subprocess.run(command, capture_output=True)
    return ["-include", str(header)]


def check(compiler: list[str], flags: tuple[str, ...], files: list[Path], once: set[str], folder: Path) -> None:
    """Checks each file without generating code; skips the test if the compiler cannot build with `flags`.

    The system's headers `once` are parsed once for all files. As with a build, the cache remembers sources that passed.
    """
    command = [*compiler, *flags, "-std=c++17", *STRICT, "-fsyntax-only", "-x", "c++", os.devnull]
    if shutil.which(compiler[0]) is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no compiler here knows such processors")
    names = (file.name for file in files)
    passed = cache_folder() / f"checked-{digest(SOURCES, *command, *names, *sorted(once), version(compiler))}"
    if passed.exists():
        return
    more = parsed_once(compiler, flags, once, folder)

    def errors(file: Path) -> str:
        done = subprocess.run([*command, *more, f"-I{SOURCES}", "-include", str(file)], capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert not "".join(pool.map(errors, files))
    passed.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    passed.touch()


@pytest.mark.parametrize("flags", ONLY_COMPILED, ids=" ".join)
def test_sources_compile_for_processors_that_this_is_not(
    compiler: list[str], flags: tuple[str, ...], tmp_path: Path
) -> None:
    check(compiler, flags, sorted(SOURCES.rglob("*.cpp")), standard_headers(), tmp_path)


@pytest.mark.parametrize("level", [LEVELS["aarch64"][0], LEVELS["aarch64"][-1]], ids=lambda level: level.name)
def test_sources_compile_for_arm(level: Level, tmp_path: Path) -> None:
    check(ARM, level.flags, sorted(SOURCES.rglob("*.cpp")), INTRINSICS, tmp_path)


@pytest.mark.parametrize("level", [ALL[0], ALL[-1]], ids=lambda level: level.name)
def test_a_header_includes_what_it_uses(compiler: list[str], level: Level, tmp_path: Path) -> None:
    """Checked with the fewest instructions and with all, because headers leave code out without some instructions."""
    check(compiler, level.flags, sorted(SOURCES.glob("*.h")), INTRINSICS, tmp_path)
