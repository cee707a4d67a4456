"""Settings of the C allocator."""

import ctypes
import platform

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks of up to 64 MiB for the next allocation.

    By default glibc returns most activations to the operating system when they are freed, and the next allocation costs
    page faults again: a float32 copy of [512, 1024] then takes ten times as long. Other C libraries are not changed.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, 64 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def return_freed_memory() -> None:
    """Returns the freed memory that glibc still holds to the operating system."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
