"""Builds the libraries of kernels for a wheel; `setup.py` calls this without torch."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from quire.ops.cpu import builder
from quire.ops.cpu.builds import MAX_BUILD_SECONDS, BuildError, digest, parts_of, sources_of
from quire.ops.cpu.compiler import FLAGS, SOURCES, find_compiler, knows
from quire.ops.cpu.isa_levels import LEVELS, Level

FOLDER = "libraries"
"""The folder beside this file, in an installed wheel."""


def asked_levels(environment: Mapping[str, str] = os.environ) -> list[Level]:
    """Returns the levels for a wheel: those of `QUIRE_WHEEL_ISA`, or all for this kind of processor.

    Raises:
        ValueError: the variable names an unknown level.
    """
    known = {level.name: level for level in LEVELS.get(platform.machine(), ())}
    default = ",".join(known) if sys.platform == "linux" and known else "none"
    asked = environment.get("QUIRE_WHEEL_ISA", default)
    names = [] if asked == "none" else asked.split(",")
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"QUIRE_WHEEL_ISA must be none, or some of {','.join(known)}; got {wrong[0]!r}.")
    return [known[name] for name in names]


def possible_levels(asked: Sequence[Level]) -> tuple[list[Level], str]:
    """Returns the levels that the compiler supports, and a sentence about the others, or an empty one."""
    try:
        compiler = find_compiler()
        possible = [level for level in asked if knows(compiler, level)]
    except BuildError as error:
        return [], f"The wheel has no CPU kernels, which are built at the first start instead: {error}" if asked else ""
    missing = [level.name for level in asked if level not in possible]
    return possible, f"The compiler does not know these processors: {', '.join(missing)}." if missing else ""


def build_libraries(levels: Sequence[Level], package: Path, scratch: Path) -> Iterator[Path]:
    """Builds the libraries of each level into the package in `package`, one after the other, and yields their paths.

    Raises:
        builder.CompilerError: the compiler fails.
    """
    folder = package / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier wheel
    folder.mkdir(parents=True)
    for level, part in product(levels, ("", *parts_of(SOURCES))):
        library = folder / shipped_name(level, part)
        command = [*find_compiler(), *FLAGS, *level.flags, "-Wl,--strip-all"]
        sources = sources_of(SOURCES, part)
        builder.build(builder.Job(command, str(SOURCES), sources, str(scratch), str(library), MAX_BUILD_SECONDS))
        yield library


def shipped_name(level: Level, part: str = "") -> str:
    """Returns the name of a wheel's library. It changes with the sources and flags, so outdated ones are ignored."""
    return f"{level.name}-{f'{part}-' if part else ''}{digest(SOURCES, *FLAGS, *level.flags, part=part)}.so"
