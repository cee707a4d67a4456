"""Builds wheels with the C++ kernels in them: one library for each level of the builder's kind of processor.

Without a C++ compiler the wheel is pure: where it is installed, the kernels are built at the first start. They are
built so for an editable install, too. `QUIRE_WHEEL_ISA` lists the levels to build, separated by commas, or `none`.
"""

import logging
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # the package, where there is no torch yet

from quire.ops.cpu import shipping

LEVELS, MISSING = shipping.possible_levels(shipping.asked_levels())


class DistributionWithKernels(Distribution):
    """Belongs to one kind of machine if it has libraries."""

    def has_ext_modules(self) -> bool:
        return bool(LEVELS)


class BuildWithKernels(build_py):
    """Adds the libraries to the package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if MISSING:
            logging.warning(MISSING)
        folder = Path(self.build_lib, "quire/ops/cpu")
        for library in shipping.build_libraries(LEVELS, folder, folder / "scratch"):
            logging.info("%s: %.0f kB", library.name, library.stat().st_size / 1e3)


class WheelWithKernels(bdist_wheel):
    """Tags a wheel with libraries for this kind of machine, and for any Python 3: they know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, machine = super().get_tag()
        return "py3", "none", machine if LEVELS else "any"


setup(
    distclass=DistributionWithKernels,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels},
)
