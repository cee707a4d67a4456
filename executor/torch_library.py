"""Loads torch's library in a thread: its C++ constructors take half of the import of torch.

This file must not import torch. Python does later, and finds the library in memory.
"""

import ctypes
import importlib.util
import os
import threading
from pathlib import Path


def load_ahead() -> threading.Thread:
    """Starts a thread that loads the library, without the interpreter's lock. Does nothing if there is no library."""
    # The interpreter waits for the thread at its end, as the library may not be loaded while the process is torn down.
    thread = threading.Thread(target=_load, name="torch library")
    thread.start()
    return thread


def _load() -> None:
    spec = importlib.util.find_spec("torch")
    [folder] = spec.submodule_search_locations or [""] if spec is not None else [""]
    dlopen = ctypes.CDLL(None).dlopen  # called as a function, it releases the lock, which `ctypes.CDLL` holds
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    # In torch's order and with its flags: what the first depends on is visible to the second.
    for name, scope in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_LOCAL)):
        path = Path(folder, "lib", name)
        if path.is_file():
            dlopen(os.fsencode(path), os.RTLD_NOW | scope)
