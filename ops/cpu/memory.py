"""The C allocator's manners."""

import ctypes
import platform

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Tells glibc to keep freed blocks of up to 64 MiB for the next allocation.

    By default it hands most activations back to the kernel when they are freed, and each one is paid for again in page
    faults: a float32 copy of [512, 1024] then takes ten times as long. Other C libraries are left as they are.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, 64 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def return_freed_memory() -> None:
    """Gives back to the system, now, what `keep_freed_memory` has kept so far."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
