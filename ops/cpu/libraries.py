"""Finds and loads the library of C++ kernels that suits this processor.

A wheel brings a library for each level (`levels.py`). Without one, or for a better level than the wheel has, the
kernels are built when a worker first binds the CPU backend on a machine: at start-up, before the weights are read. So
all tokens of a process come from the same kernels. Without any library, the backend is plain torch.

`QUIRE_CPU_ISA` forces a level. `QUIRE_DISABLED_KERNELS=cpu_native` disables the kernels.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.ops.cpu import levels
from quire.ops.cpu.builds import MAX_BUILD_SECONDS, BuildError, KernelBuild
from quire.ops.cpu.compiler import SOURCES, find_compiler, kernel_build, knows
from quire.ops.cpu.levels import Level
from quire.ops.cpu.shipping import FOLDER, shipped_name

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / FOLDER
"""Folder of the libraries that a wheel brings."""


class Kernels(ctypes.CDLL):
    """A loaded library. `level` is the name of its level."""

    level: str


@functools.cache
def load_kernels() -> Kernels | None:
    """The kernels' library; None if it is disabled, or can be neither found nor built.

    Raises:
        UnknownLevelError: this processor does not have the level that `QUIRE_CPU_ISA` asks for.
    """
    disabled = os.environ.get("QUIRE_DISABLED_KERNELS", os.environ.get("VLLM_DISABLED_KERNELS", ""))
    if "cpu_native" in disabled.split(","):
        return None
    chosen = chosen_levels()
    library = _load_shipped(chosen[:1])
    if library is not None:
        return library
    try:
        return _load_built(chosen)
    except BuildError as error:
        reason = str(error)
    except OSError as error:
        remedy = "Set QUIRE_CACHE_ROOT to another folder, in which files may be written and executed."
        reason = f"{error}. {remedy}"
    library = _load_shipped(chosen[1:])
    if library is None:
        logger.warning("CPU kernels are not available, so plain torch is used, which is slower: %s", reason)
    return library


def chosen_levels() -> tuple[Level, ...]:
    """The levels that this process may load, the best first.

    Raises:
        UnknownLevelError: as in `load_kernels`.
    """
    return levels.choose(os.environ.get("QUIRE_CPU_ISA", os.environ.get("VLLM_CPU_ISA")))


def _load_shipped(chosen: Iterable[Level]) -> Kernels | None:
    """The first library that the wheel brings and that this system can load."""
    for level in chosen:
        path = SHIPPED / shipped_name(level)
        if path.exists():
            try:
                return load(level, path)
            except OSError as error:  # for instance of an older C library than that of the wheel's maker
                logger.info("the wheel's CPU kernels cannot be loaded here: %s", error)
    return None


def _load_built(chosen: Sequence[Level]) -> Kernels:
    """The best library that the compiler can make; it is built unless the cache has it.

    Raises:
        BuildError: there is no library.
        OSError: the cache cannot be written, or the library not be loaded.
    """
    level, build = _best_build(chosen)
    return load(level, build.library())


def _best_build(chosen: Sequence[Level]) -> tuple[Level, KernelBuild]:
    """The first level that the compiler knows, or else the last one. Raises BuildError if there is no compiler."""
    builds = ((level, kernel_build(SOURCES, level)) for level in chosen)
    found = next((each for each in builds if _is_possible(*each)), None)
    return found or (chosen[-1], kernel_build(SOURCES, chosen[-1]))


def build_ahead() -> None:
    """Builds the library that this machine's first server would build, unless there is one.

    Raises:
        UnknownLevelError: as in `load_kernels`.
        BuildError: there is no library; the server that asks again says so.
        OSError: the cache cannot be written.
    """
    chosen = chosen_levels()
    if _load_shipped(chosen[:1]) is None:
        _, build = _best_build(chosen)
        build.library(max_wait_s=MAX_BUILD_SECONDS)


def _is_possible(level: Level, build: KernelBuild) -> bool:
    if build.is_decided or knows(find_compiler(), level):
        return True
    logger.info("the compiler does not know this processor's %s; a newer one may.", level.name)
    return False


def load(level: Level, path: Path) -> Kernels:
    """The library of a level at `path`. Raises OSError if it cannot be loaded."""
    library = Kernels(str(path))
    library.level = level.name
    logger.debug("CPU kernels: %s, from %s", level.name, path)
    return library
