"""The levels of the C++ kernels (`quire.ops.cpu.levels`) as the tests need them: built by this machine's compiler."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.ops.cpu import NativeBackend, levels
from quire.ops.cpu.activation_bits import ActivationBits
from quire.ops.cpu.builds import MAX_BUILD_SECONDS, BuildError
from quire.ops.cpu.compiler import SOURCES, kernel_build
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.libraries import Kernels, load
from quire.ops.cpu.onednn import OneDnnLinear
from quire.ops.eager.backend import EagerBackend


class ByteProducts(NamedTuple):
    """How activations become 8 bits."""

    block: int
    """Most inputs that share a scale; fewer if the weight's groups have fewer."""
    adds_neighbours: bool = False
    """Whether the scale suits sums of two neighbours, and not single numbers."""


@dataclass(frozen=True)
class Level:
    """A level that this machine can run, and what its kernels can do."""

    level: levels.Level

    @property
    def name(self) -> str:
        """As in `QUIRE_CPU_ISA`."""
        return self.level.name

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
        return levels.instruction_sets() if self.level == levels.NATIVE else self.level.needs

    @property
    def has_byte_products(self) -> bool:
        """Whether they multiply activations of 8 bits."""
        return "avx512_vnni" in self._has or ("avx2" in self._has and "avx512f" not in self._has)

    def byte_products(self, code_bits: int) -> ByteProducts:
        """How they do that beside codes of so many bits."""
        if "avx512_vnni" in self._has:
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
        """This build; skips the test without a compiler."""
        return load(self.level, self.library())

    def library(self) -> Path:
        """The file of this build; skips the test without a compiler."""
        try:
            build = kernel_build(SOURCES, self.level)
        except BuildError as error:
            pytest.skip(str(error))
        return build.library(max_wait_s=MAX_BUILD_SECONDS)  # a busy machine takes its time


RUNNABLE = [Level(level) for level in levels.available()]
"""This processor's own, as the server builds it, and those below."""
ALL = list(levels.LEVELS.get(platform.machine(), ()))
"""Those of this kind of processor."""
ONLY_COMPILED = [level.flags for level in ALL if level not in levels.available()]
"""What this machine cannot run."""
if platform.machine() == "x86_64":
    # For these the sources must choose the level below: there are processors with a part of AVX-512, for one.
    ONLY_COMPILED += [("-march=x86-64", "-mavx"), ("-march=x86-64-v3", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")]
