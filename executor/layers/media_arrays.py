"""Arrays of images and sounds as tensors."""

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.media import Array


def tensor_of(array: Array) -> Tensor:
    """Copies an array into a tensor of its dtype, on the host."""
    if array.dtype == "bfloat16":  # which NumPy lacks
        values = np.frombuffer(array.data, np.int16).reshape(array.shape)
        return torch.from_numpy(values.copy()).view(torch.bfloat16)
    return torch.from_numpy(np.frombuffer(array.data, array.dtype).reshape(array.shape).copy())
