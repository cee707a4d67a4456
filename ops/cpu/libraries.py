"""Finds and loads the libraries of C++ kernels that suit this processor.

A wheel brings the libraries of each level (`isa_levels.py`). Without them, or for a better level than the wheel has,
the kernels are built when a worker first binds the CPU backend on a machine: at start-up, before the weights are read.
So all tokens of a process come from the same kernels. Without any library, the backend is plain torch. What only some
models need is in libraries of its own (`builds.py`), each found or built when its first kernel is asked for.

`QUIRE_CPU_ISA` forces a level. `QUIRE_DISABLED_KERNELS=cpu_native` disables the kernels.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from quire.ops.cpu import isa_levels
from quire.ops.cpu.builds import BuildError, KernelBuild, parts_of
from quire.ops.cpu.compiler import SOURCES, find_compiler, kernel_build, knows
from quire.ops.cpu.isa_levels import Level
from quire.ops.cpu.shipping import FOLDER, shipped_name

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / FOLDER
"""Folder of the libraries that a wheel brings."""

_FOLDER_REMEDY = "Set QUIRE_CACHE_ROOT to another folder, in which files may be written and executed."


class Kernels(ctypes.CDLL):
    """The main library of a level, and its parts."""

    def __init__(self, level: Level, find: Callable[[str], Path]) -> None:
        """`find` finds or builds the library of a part, or the main one: ''.

        Raises:
            BuildError: there is no library.
            OSError: it cannot be loaded, or the cache not be written.
        """
        path = find("")
        super().__init__(str(path))
        self.level = level.name
        self._find = find
        self._parts: dict[str, ctypes.CDLL | None] = {}
        logger.debug("CPU kernels: %s, from %s", level.name, path)

    def part(self, name: str) -> ctypes.CDLL | None:
        """The library of a part, which works with the threads of the main one; None if there is none: the log says why.

        It is loaded, and built if need be, at the first call.
        """
        if name not in self._parts:
            self._parts[name] = self._load_part(name)
        return self._parts[name]

    def _load_part(self, name: str) -> ctypes.CDLL | None:
        try:
            path = self._find(name)
            library = ctypes.CDLL(str(path))
        except (BuildError, OSError) as error:
            logger.warning("%s", _unavailable(f"CPU kernels ({name})", error))
            return None
        logger.debug("CPU kernels (%s): %s, from %s", name, self.level, path)
        library["quire_join_team"](self["quire_run_team"])
        return library


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
        level, build = _best_build(chosen)
        return Kernels(level, lambda part: (kernel_build(SOURCES, level, part) if part else build).library())
    except (BuildError, OSError) as error:
        reason = _unavailable("CPU kernels", error)
    library = _load_shipped(chosen[1:])
    if library is None:
        logger.warning("%s", reason)
    return library


def _unavailable(what: str, error: Exception) -> str:
    remedy = "" if isinstance(error, BuildError) else f". {_FOLDER_REMEDY}"
    return f"{what} are not available, so plain torch is used, which is slower: {error}{remedy}"


def chosen_levels() -> tuple[Level, ...]:
    """The levels that this process may load, the best first.

    Raises:
        UnknownLevelError: as in `load_kernels`.
    """
    return isa_levels.choose(os.environ.get("QUIRE_CPU_ISA", os.environ.get("VLLM_CPU_ISA")))


def _load_shipped(chosen: Iterable[Level]) -> Kernels | None:
    """The first library that the wheel brings and that this system can load."""
    for level in chosen:
        if (SHIPPED / shipped_name(level)).exists():
            try:
                return Kernels(level, partial(_shipped, level))
            except OSError as error:  # for instance of an older C library than that of the wheel's maker
                logger.info("the wheel's CPU kernels cannot be loaded here: %s", error)
    return None


def _shipped(level: Level, part: str) -> Path:
    return SHIPPED / shipped_name(level, part)


def _best_build(chosen: Sequence[Level]) -> tuple[Level, KernelBuild]:
    """The first level that the compiler knows, or else the last one. Raises BuildError if there is no compiler."""
    builds = ((level, kernel_build(SOURCES, level)) for level in chosen)
    found = next((each for each in builds if _is_possible(*each)), None)
    return found or (chosen[-1], kernel_build(SOURCES, chosen[-1]))


def builds_ahead() -> list[KernelBuild]:
    """The libraries that servers on this machine would build, the main one first; none if a wheel brings them.

    Raises:
        UnknownLevelError: as in `load_kernels`.
        BuildError: there is no compiler; the server that asks again says so.
    """
    chosen = chosen_levels()
    if _load_shipped(chosen[:1]) is not None:
        return []
    level, build = _best_build(chosen)
    return [build, *(kernel_build(SOURCES, level, part) for part in parts_of(SOURCES))]


def _is_possible(level: Level, build: KernelBuild) -> bool:
    if build.is_decided or knows(find_compiler(), level):
        return True
    logger.info("the compiler does not know this processor's %s; a newer one may.", level.name)
    return False
