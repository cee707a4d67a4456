"""Builds the kernels that tests load, if the cache lacks them, before they ask: `python -m tests.ops.build_ahead`.

A build takes a minute of two processors, and there is one for each level that this machine can run or emulate. With the
argument `own`, only this processor's own is built, which every server in the tests loads.
"""

import sys
from contextlib import suppress

from quire.ops.cpu.builds import MAX_BUILD_SECONDS, BuildError
from quire.ops.cpu.isa_levels import LEVELS
from tests.ops.levels import RUNNABLE, TESTED_WITH_INTEGERS
from tests.ops.test_arm import IS_TESTED, arm_build


def main() -> None:
    tested = RUNNABLE[:1] if sys.argv[1:] == ["own"] else TESTED_WITH_INTEGERS
    with suppress(BuildError):  # a test says why there is none
        builds = [build for level in tested for build in level.builds()]
        if IS_TESTED and len(tested) > 1:
            builds += map(arm_build, LEVELS["aarch64"])
        for build in builds:
            with suppress(BuildError):
                build.library(max_wait_s=MAX_BUILD_SECONDS)


if __name__ == "__main__":
    main()
