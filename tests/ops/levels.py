"""The instruction sets for which the C++ kernels have code, and which of them this machine has."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.ops.cpu import NativeBackend
from quire.ops.cpu.builds import BuildError
from quire.ops.cpu.compiler import SOURCES, THIS_PROCESSOR, kernel_build
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.onednn import OneDnnLinear
from quire.ops.eager.backend import EagerBackend


@dataclass(frozen=True)
class Level:
    """A build of the kernels."""

    name: str
    target: tuple[str, ...]
    """The compiler's flags for it."""
    needs: frozenset[str] = frozenset()
    """What /proc/cpuinfo lists on processors that can run it."""
    has_float16: bool = True
    """Whether the kernels convert from and to float16, and do not leave that to torch."""
    has_panels: bool = False
    """Whether they multiply matrices of bfloat16, and do not leave that to oneDNN."""

    def backend(self) -> NativeBackend:
        """The backend with this build; skips the test without a compiler."""
        try:
            build = kernel_build(SOURCES, self.target)
        except BuildError as error:
            pytest.skip(str(error))
        fallbacks = Fallbacks()
        return NativeBackend(ctypes.CDLL(str(build.library())), EagerBackend(OneDnnLinear(fallbacks)), fallbacks)


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_BF16 = _V4 | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16")

LEVELS = [
    Level("x86-64", ("-march=x86-64",), has_float16=False),
    Level("AVX2", ("-march=x86-64-v3",), needs=_V3),
    Level("AVX512", ("-march=x86-64-v4",), needs=_V4),
    Level("AVX512-BF16", _BF16_FLAGS, needs=_BF16, has_panels=True),
    Level("AMX", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"), needs=_AMX, has_panels=True),
]
PARTS_OF_LEVELS = [
    ("-march=x86-64", "-mavx"),
    ("-march=x86-64-v3", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
]
"""For these the sources must choose the level below: there are processors with a part of AVX-512, for one."""


def _instruction_sets() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


_HAVE = _instruction_sets()
_OWN = Level("own", THIS_PROCESSOR, _HAVE, has_float16="f16c" in _HAVE, has_panels=_HAVE >= _BF16)
RUNNABLE = [_OWN, *[level for level in LEVELS if _HAVE and level.needs <= _HAVE][:-1]]
"""This processor's own, as the server builds it, and those below."""
ONLY_COMPILED = [level.target for level in LEVELS if not (_HAVE and level.needs <= _HAVE)] + PARTS_OF_LEVELS
"""What this machine cannot run."""
