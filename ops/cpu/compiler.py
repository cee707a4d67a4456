"""Builds this folder's C++ kernels for the machine it runs on, once, and keeps the result in the user's cache folder.

The sources include no torch header, so a build takes seconds (seven on two cores) and outlives a torch update. It
happens when a worker first binds the CPU backend on a machine: at start-up, before the weights are read, so that all of
a process's tokens come from the same kernels. Without a working compiler the torch operations serve.

`CXX` names the compiler (default c++, then g++, then clang++). `QUIRE_CACHE_ROOT` moves the cache from
`$XDG_CACHE_HOME/quire` or `~/.cache/quire`. `QUIRE_DISABLED_KERNELS=cpu_native` leaves the kernels out.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "kernels"
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-pthread", "-fPIC", "-fno-math-errno", "-w"]
_TIMEOUT_S = 120


class BuildError(Exception):
    """The kernels could not be built; the text says why, in one line."""


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """The kernels' library, built if this machine has none yet; None if they are disabled or cannot be built."""
    disabled = os.environ.get("QUIRE_DISABLED_KERNELS", os.environ.get("VLLM_DISABLED_KERNELS", ""))
    if "cpu_native" in disabled.split(","):
        return None
    try:
        return ctypes.CDLL(str(build(cache_folder())))
    except (BuildError, OSError) as error:
        logger.warning("CPU kernels are not available, so plain torch is used, which is slower: %s", error)
        return None


def cache_folder() -> Path:
    """Where built kernels are kept."""
    root = os.environ.get("QUIRE_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT"))
    if root:
        return Path(root).expanduser() / "cpu_kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire" / "cpu_kernels"


def build(folder: Path) -> Path:
    """Path of the library in `folder`, which is made if needed. Any number of processes may call this at once.

    Raises:
        BuildError: there is no compiler, or it refuses the sources.
        OSError: the folder cannot be written.
    """
    compiler = _compiler()
    library = folder / f"kernels-{_key([*compiler, *_FLAGS])}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    started = time.monotonic()
    logger.info("building the CPU kernels for this machine, once")
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [[*compiler, *_FLAGS, "-c", str(path)] for path in sorted(_SOURCES.glob("*.cpp"))]
            list(pool.map(_run, commands, repeat(scratch)))
        objects = sorted(path.name for path in Path(scratch).glob("*.o"))
        _run([*compiler, "-shared", "-pthread", "-o", "kernels.so", *objects], scratch)
        os.replace(Path(scratch) / "kernels.so", library)  # at once: another process sees all of it or nothing
    logger.info("CPU kernels built in %.1f s: %s", time.monotonic() - started, library)
    return library


def _compiler() -> list[str]:
    asked = os.environ.get("CXX")
    if asked:
        return shlex.split(asked)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found; install g++, or name one in CXX.")


def _run(command: list[str], folder: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except FileNotFoundError:
        raise BuildError(f"the compiler {command[0]!r} (from CXX) does not exist.") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took longer than {_TIMEOUT_S} s.") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}")


def _key(parts: list[str]) -> str:
    """Hash of all that the library depends on: sources, command and the processor's instruction sets."""
    digest = hashlib.sha256("\0".join([*parts, platform.machine(), _instruction_sets()]).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _instruction_sets() -> str:
    """The processor's own list; its name where the system has no such list."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    listed = next((line for line in lines if line.lower().startswith(("flags", "features"))), None)
    return listed or platform.processor()  # which starts a process to find out
