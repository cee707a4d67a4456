"""Builds the kernels before a server needs them: `python -m quire.ops.cpu.build_ahead`, where torch may be missing.

`scripts/setup` runs this beside the installation. What cannot be built is no error here: the first server says why.
"""

from contextlib import suppress

from quire.ops.cpu.builds import BuildError
from quire.ops.cpu.levels import UnknownLevelError
from quire.ops.cpu.libraries import build_ahead

if __name__ == "__main__":
    with suppress(BuildError, UnknownLevelError, OSError):
        build_ahead()
