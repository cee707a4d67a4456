"""Limits of the system, for tests of what happens at them."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def small_files(most: int) -> Iterator[None]:
    """Limits files to `most` bytes: a write beyond them is partial, as on a full disk. Keep it short, because the test
    report may be a file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
