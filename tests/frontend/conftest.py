"""Engines started by these tests compute on one thread: tiny models gain nothing from two, and lose all on a busy host."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
