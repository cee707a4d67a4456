"""Arrays of the host on a device."""

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copies `array` to `device`. The host does not wait: the device copies from pinned memory in stream order."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
