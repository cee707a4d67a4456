"""The kernels' levels (`quire.ops.cpu.isa_levels`) as the tests need them: built by this machine's compiler."""

import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire.ops.cpu import isa_levels
from quire.ops.cpu.activation_bits import ActivationBits
from quire.ops.cpu.builds import MAX_BUILD_SECONDS, BuildError, KernelBuild, parts_of
from quire.ops.cpu.compiler import FLAGS, SOURCES, cache_folder, find_compiler, kernel_build, version
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.libraries import Kernels
from quire.ops.cpu.native import NativeBackend
from quire.ops.cpu.onednn import OneDnnLinear
from quire.ops.eager.backend import EagerBackend


class ByteProducts(NamedTuple):
    """How activations become 8 bits."""

    block: int
    """Most inputs that share a scale; fewer if the weight's groups have fewer."""
    adds_neighbours: bool = False
    """Whether the scale suits sums of two neighbours, and not single numbers."""
    steps_an_octave: int = 0
    """Scales between powers of two, to which others are rounded up; 0: any number is a scale."""


EMULATED_FLAGS = ("-mamx", "-mavxvnni")
"""What the compiler must not be told where a header emulates it."""


@dataclass(frozen=True)
class Level:
    """A level that this machine can run, and what its kernels can do."""

    level: isa_levels.Level
    emulation: Path | None = None
    """A header, included before the kernels, with what this processor lacks of the level's instructions."""

    @property
    def name(self) -> str:
        """As in `QUIRE_CPU_ISA`, or what says that it is emulated."""
        return f"emulated {self.level.name}" if self.emulation else self.level.name

    @property
    def has_float16(self) -> bool:
        """Whether the kernels convert from and to float16, and do not leave that to torch."""
        return "f16c" in self._has

    @property
    def has_panels(self) -> bool:
        """Whether they multiply matrices of bfloat16, and do not leave that to oneDNN."""
        return "avx512_bf16" in self._has

    @property
    def _has(self) -> frozenset[str]:
        return isa_levels.instruction_sets() if self.level == isa_levels.NATIVE else self.level.needs

    @property
    def has_byte_products(self) -> bool:
        """Whether they multiply activations of 8 bits."""
        has_only_avx2 = "avx2" in self._has and "avx512f" not in self._has
        return has_only_avx2 or bool({"avx512_vnni", "asimddp"} & self._has)

    def byte_products(self, code_bits: int) -> ByteProducts:
        """How they do that beside codes of so many bits."""
        if "avx512_vnni" in self._has and "amx_int8" not in self._has:
            return ByteProducts(128, steps_an_octave=4)
        if {"avx512_vnni", "avx_vnni", "asimddp"} & self._has:
            return ByteProducts(128)
        return ByteProducts(32) if code_bits == 4 else ByteProducts(128, adds_neighbours=True)

    def backend(self, activation_bits: int | None = 16) -> NativeBackend:
        """The backend with this build; skips the test without a compiler.

        Beside integers activations have 16 bits, so that tests may compare with products of floats, or as many as
        asked; None: as in a server.
        """
        kernels, fallbacks = self.kernels(), Fallbacks()
        plain = EagerBackend(OneDnnLinear(fallbacks))
        return NativeBackend(kernels, plain, fallbacks, ActivationBits(kernels, activation_bits))

    def kernels(self) -> Kernels:
        """These builds; skips the test without a compiler."""
        return Kernels(self.level, self.library)

    def library(self, part: str = "") -> Path:
        """The file of a build; skips the test without a compiler."""
        try:
            build = self.build(part)
        except BuildError as error:
            pytest.skip(str(error))
        return build.library(max_wait_s=MAX_BUILD_SECONDS)  # a busy machine takes its time

    def builds(self) -> list[KernelBuild]:
        """All of this level, in the user's cache.

        Raises:
            BuildError: there is no compiler, or it does not run.
        """
        return [self.build(part) for part in ("", *parts_of(SOURCES))]

    def build(self, part: str = "") -> KernelBuild:
        """That of a part, or of the main library. Raises as `builds`."""
        if not self.emulation:
            return kernel_build(SOURCES, self.level, part)
        compiler = find_compiler()
        command = [*compiler, *FLAGS, *self.level.flags, "-include", str(self.emulation)]
        text = self.emulation.read_text()
        return KernelBuild(cache_folder(), SOURCES, command, version(compiler), text, part=part)


def emulated(name: str, header: str, needs: set[str]) -> list[Level]:
    """A level of x86-64 that this processor does not have, without the flags for what `header` emulates.

    Empty if the processor has the level, or lacks what `needs` names.
    """
    level = next(level for level in isa_levels.LEVELS["x86_64"] if level.name == name)
    if level in isa_levels.available() or not needs <= isa_levels.instruction_sets():
        return []
    flags = tuple(flag for flag in level.flags if not flag.startswith(EMULATED_FLAGS))
    return [Level(replace(level, flags=flags), Path(__file__).parent / header)]


RUNNABLE = [Level(level) for level in isa_levels.available()]
"""This processor's own, as the server builds it, and those below."""
EMULATED_AMX = emulated("amx", "emulated_amx.h", {"avx512_bf16", "avx512_vnni"})
EMULATED_AVX_VNNI = emulated("avx2_vnni", "emulated_avx_vnni.h", {"avx2", "fma", "f16c"})
"""Only its products of integers differ from those of AVX2."""
TESTED = [*EMULATED_AMX, *RUNNABLE]
"""Levels for tests of all operations."""
TESTED_WITH_INTEGERS = [*EMULATED_AVX_VNNI, *TESTED]
"""Levels for tests of products of integers."""


def in_turns(levels: Iterable[Level]) -> list[Any]:
    """Parameters of tests. Levels that a server would not choose here take turns."""
    lower = RUNNABLE[1:]
    return [pytest.param(level, marks=pytest.mark.turns(4)) if level in lower else level for level in levels]


ALL = list(isa_levels.LEVELS.get(platform.machine(), ()))
"""Those of this kind of processor."""
ONLY_COMPILED = [level.flags for level in ALL if level not in isa_levels.available()]
"""What this machine cannot run."""
if platform.machine() == "x86_64":
    # For these the sources must choose the level below: there are processors with a part of AVX-512, for one.
    ONLY_COMPILED += [("-march=x86-64", "-mavx"), ("-march=x86-64-v3", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")]
