"""The device of a rank, and its name in logs."""

import platform
from pathlib import Path

import torch

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.rank import Rank


def device_of(config: EngineConfig, rank: Rank) -> torch.device:
    """Returns the device of `rank`.

    Raises:
        ModelLoadError: torch finds no such device.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelLoadError("--device cuda was asked for, but torch finds no CUDA device; use --device cpu.")
    return torch.device(f"cuda:{config.layout.local_index(rank)}")


def device_name(device: torch.device) -> str:
    """Returns the accelerator's name; or the processor's, with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text().split("\n")
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
