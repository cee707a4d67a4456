"""Chooses the compiler, the flags and the cache folder of the C++ kernels, and loads them.

The sources include no torch header, so a build takes seconds (seven on two cores) and outlives a torch update. The
build happens when a worker first binds the CPU backend on a machine: at start-up, before the weights are read. So all
of a process's tokens come from the same kernels. Without a working compiler, the backend is plain torch.

`CXX` names the compiler (default c++, then g++, then clang++). `QUIRE_CACHE_ROOT` replaces the cache's default root,
`$XDG_CACHE_HOME/quire` or `~/.cache/quire`. `QUIRE_DISABLED_KERNELS=cpu_native` disables the kernels.
"""

import ctypes
import functools
import logging
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from quire.ops.cpu.builds import BuildError, KernelBuild

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "kernels"
THIS_PROCESSOR = ("-march=native",)
_FLAGS = ("-std=c++17", "-O3", "-pthread", "-fPIC", "-fno-math-errno", "-w")
_REMEDY = "Install g++, or name a compiler in CXX."
_VERSION_TIMEOUT_S = 30


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """The kernels' library, built if this machine has none yet; None if it is disabled or cannot be built or loaded."""
    disabled = os.environ.get("QUIRE_DISABLED_KERNELS", os.environ.get("VLLM_DISABLED_KERNELS", ""))
    if "cpu_native" in disabled.split(","):
        return None
    try:
        return ctypes.CDLL(str(kernel_build(SOURCES).library()))
    except BuildError as error:
        reason = str(error)
    except OSError as error:
        remedy = "Set QUIRE_CACHE_ROOT to another folder, in which files may be written and executed."
        reason = f"{error}. {remedy}"
    logger.warning("CPU kernels are not available, so plain torch is used, which is slower: %s", reason)
    return None


def kernel_build(sources: Path, target: tuple[str, ...] = THIS_PROCESSOR) -> KernelBuild:
    """The build of `sources` by this machine's compiler; `target` are the flags that choose the processor.

    Raises:
        BuildError: there is no compiler, or it does not run.
    """
    compiler = find_compiler()
    return KernelBuild(cache_folder(), sources, [*compiler, *_FLAGS, *target], _version(compiler))


def cache_folder() -> Path:
    """The folder of built kernels."""
    root = os.environ.get("QUIRE_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT"))
    if root:
        return Path(root).expanduser() / "cpu_kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire" / "cpu_kernels"


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


def _version(compiler: list[str]) -> str:
    """The compiler's name and version, so that an updated compiler at the same path makes another build."""
    command = [*compiler, "--version"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler does not work: {error}. {_REMEDY}") from None
