"""Halves the arrays of an item for towers that compute in 16 bits: they round each number so in any case.

Only helper processes import this.
"""

from collections.abc import Mapping

import msgspec
import numpy as np
import torch

from quire.core.wire.media import Array
from quire.frontend.media.messages import FloatType, ReadyItem


def narrowed(item: ReadyItem, dtype: FloatType) -> ReadyItem:
    """Rounds the float32 arrays of an item, but not its facts, to the model's `dtype`."""
    if dtype == "float32":
        return item
    return msgspec.structs.replace(item, arrays=_rounded(item.arrays, getattr(torch, dtype), dtype))


def _rounded(arrays: Mapping[str, Array], dtype: torch.dtype, name: str) -> dict[str, Array]:
    found = {}
    for key, array in arrays.items():
        if array.dtype in ("<f4", "float32"):
            values = torch.from_numpy(np.frombuffer(array.data, "<f4").copy()).to(dtype)
            array = Array(name, array.shape, values.view(torch.int16).numpy().tobytes())
        found[key] = array
    return found
