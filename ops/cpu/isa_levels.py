"""The instruction sets for which the C++ kernels are compiled, and their detection on this processor.

A level is one build of all kernels. The compiler's flags determine the instructions in the sources
(`kernels/vector.h`), so a level is only a set of flags. This file imports only the standard library, because wheels are
built without torch.
"""

import functools
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Level:
    """A build of the kernels."""

    name: str
    """The name in `QUIRE_CPU_ISA`."""
    flags: tuple[str, ...]
    """The compiler's flags for it."""
    needs: frozenset[str] = frozenset()
    """The entries of /proc/cpuinfo on processors that can run it."""


class UnknownLevelError(ValueError):
    """`QUIRE_CPU_ISA` names a level that this processor or these sources lack; the text lists the valid ones."""


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_V4_FLAG = "-march=x86-64-v4"
_ARM_DOT = frozenset(["asimd", "asimdhp", "asimddp"])

LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        Level("x86_64", ("-march=x86-64",)),
        Level("avx2", ("-march=x86-64-v3",), _V3),
        Level("avx2_vnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
        Level("avx512", (_V4_FLAG,), _V4),
        Level("avx512_vnni", (_V4_FLAG, "-mavx512vnni"), _VNNI),
        Level("avx512_bf16", (_V4_FLAG, "-mavx512vnni", "-mavx512bf16"), _BF16),
        Level(
            "amx",
            (_V4_FLAG, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
            _BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
        ),
    ),
    "aarch64": (
        Level("neon", ("-march=armv8-a",)),
        Level("neon_dotprod", ("-march=armv8.2-a+fp16+dotprod",), _ARM_DOT),
        Level("neon_bf16", ("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",), _ARM_DOT | {"bf16", "i8mm"}),
    ),
}
"""The levels by `platform.machine()`, the slowest first. A processor can run all levels before its own, except
`avx2_vnni`, which the first processors with AVX-512 lack.
"""

NATIVE = Level("native", ("-march=native",))
"""The level for other processors, and for systems that do not list a processor's instruction sets."""


def available() -> tuple[Level, ...]:
    """Lists the levels that this processor can run, the best first; at least one."""
    listed = instruction_sets()
    found = [level for level in LEVELS.get(platform.machine(), ()) if listed and level.needs <= listed]
    return tuple(reversed(found)) or (NATIVE,)


def choose(asked: str | None) -> tuple[Level, ...]:
    """Lists the levels that may be loaded, the best first: only `asked` if given, else all that are available.

    Raises:
        UnknownLevelError: this processor does not have the level `asked`.
    """
    levels = available()
    chosen = tuple(level for level in levels if asked in (None, "", level.name))
    if not chosen:
        raise UnknownLevelError(
            f"QUIRE_CPU_ISA must be one of {', '.join(level.name for level in levels)}, which this processor has, "
            f"got {asked!r}."
        )
    return chosen


@functools.cache
def instruction_sets() -> frozenset[str]:
    """Returns the processor's entries in /proc/cpuinfo; empty if the system has no such list."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.lower().startswith(("flags", "features"))), "").split())
