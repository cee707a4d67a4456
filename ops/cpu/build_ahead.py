"""Builds the kernels before a server needs them: `python -m quire.ops.cpu.build_ahead`, also without torch.

`scripts/setup` runs this during the installation: the main library first, then the parts at a lower priority, because
the first server may not need them. A failed build is no error here: the server that needs it logs the reason.
"""

import os
from contextlib import suppress

from quire.ops.cpu.builds import BACKGROUND_NICENESS, MAX_BUILD_SECONDS, BuildError
from quire.ops.cpu.isa_levels import UnknownLevelError
from quire.ops.cpu.libraries import builds_ahead

if __name__ == "__main__":
    with suppress(BuildError, UnknownLevelError, OSError):
        for number, build in enumerate(builds_ahead()):
            build.library(max_wait_s=MAX_BUILD_SECONDS)
            if number == 0:
                os.nice(BACKGROUND_NICENESS)
