"""When this program began. The system's own record would count a shell that turned into it by `exec`."""

import time

STARTED_AT = time.monotonic()
"""Seconds of CLOCK_MONOTONIC at the first import of this module, which `quire` imports before all others."""
