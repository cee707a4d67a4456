"""Finds the accelerator without importing torch, which takes 2 s and 220 MB that a frontend does not need."""

import ctypes
import os
from pathlib import Path
from typing import Literal

from quire.core.errors import ConfigError


def choose(option: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The device to run on. Raises ConfigError when `option` is `cuda` and CUDA cannot be used."""
    if option == "cpu":
        return "cpu"
    obstacle = _cuda_obstacle()
    if obstacle is None:
        return "cuda"
    if option == "cuda":
        raise ConfigError(f"--device cuda: {obstacle}; use --device cpu or mend that.")
    return "cpu"


def gpu_memory_bytes() -> int:
    """Total memory of the first GPU in bytes, as NVML reports it; 0 without a report."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return 0
    return 0 if nvml.nvmlDeviceGetMemoryInfo(handle, memory) else int(memory[0])


def _cuda_obstacle() -> str | None:
    """The reason why CUDA cannot be used; None if it can."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty"
    if not Path("/proc/driver/nvidia/version").exists():
        return "no NVIDIA driver is loaded"
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms, which a machine without a GPU saves

    try:
        if version("torch").endswith("+cpu"):
            return "the installed torch is a CPU build"
    except PackageNotFoundError:
        return "torch is not installed"
    return None
