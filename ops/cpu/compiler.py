"""Chooses the compiler, its flags and the cache folder of the C++ kernels.

The sources include no torch header, so a build takes less than a minute on two cores and outlives a torch update.

`CXX` names the compiler (default c++, then g++, then clang++). `QUIRE_CACHE_ROOT` replaces the cache's default root,
`$XDG_CACHE_HOME/quire` or `~/.cache/quire`. Like `isa_levels.py`, this file needs no torch.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from quire.ops.cache_root import cache_root
from quire.ops.cpu.builds import BuildError, KernelBuild
from quire.ops.cpu.isa_levels import NATIVE, Level, instruction_sets

SOURCES = Path(__file__).parent / "kernels"
FLAGS = ("-std=c++17", "-O3", "-pthread", "-fPIC", "-fno-math-errno", "-w")
_REMEDY = "Install g++, or name a compiler in CXX."
_TIMEOUT_S = 30


def kernel_build(sources: Path, level: Level, part: str = "") -> KernelBuild:
    """The build of `sources`, or of their `part`, for `level` by this machine's compiler, in the cache.

    Raises:
        BuildError: there is no compiler, or it does not run.
    """
    compiler = find_compiler()
    processor = sorted(instruction_sets()) if level == NATIVE else []
    command = [*compiler, *FLAGS, *level.flags]
    return KernelBuild(cache_folder(), sources, command, version(compiler), *processor, part=part)


def cache_folder() -> Path:
    """The folder of built kernels."""
    return cache_root() / "cpu_kernels"


def find_compiler() -> list[str]:
    """The compiler's absolute path, and its arguments if CXX has some.

    Raises:
        BuildError: there is no compiler.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    for name, *arguments in [asked] if asked else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(name)
        if path:
            return [os.path.abspath(path), *arguments]
    raise BuildError(
        f"the compiler {asked[0]!r} (from CXX) does not exist. {_REMEDY}"
        if asked
        else f"there is no C++ compiler. {_REMEDY}"
    )


def knows(compiler: list[str], level: Level) -> bool:
    """Returns True if the compiler has the level's flags; old ones lack those of later processors."""
    return _run([*compiler, *level.flags, "-fsyntax-only", "-x", "c++", os.devnull]).returncode == 0


def version(compiler: list[str]) -> str:
    """Returns the compiler's name and version, so that an updated compiler at the same path triggers a new build.

    Raises:
        BuildError: it does not run.
    """
    return _run([*compiler, "--version"]).stdout


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler does not work: {error}. {_REMEDY}") from None
