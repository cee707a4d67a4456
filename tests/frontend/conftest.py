"""Engines started by these tests compute on one thread: on a busy host, tiny models lose much with two."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
