"""Builds the kernels before a server needs them: `python -m quire.ops.cpu.build_ahead`, also without torch.

`scripts/setup` runs this during the installation. A failed build is no error here: the first server logs the reason.
"""

from contextlib import suppress

from quire.ops.cpu.builds import BuildError
from quire.ops.cpu.levels import UnknownLevelError
from quire.ops.cpu.libraries import build_ahead

if __name__ == "__main__":
    with suppress(BuildError, UnknownLevelError, OSError):
        build_ahead()
