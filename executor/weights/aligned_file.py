"""Writes safetensors files whose tensors begin at multiples of a cache line, so that kernels may use them in place.

Format: https://huggingface.co/docs/safetensors. The library's own writer aligns to a tensor's numbers alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.executor.weights.tensor_files import SAFETENSORS_DTYPES

ALIGNMENT = 64
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def write_aligned(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Writes dense copies of `tensors`, one after another, and between them tensors of zeros. Returns the bytes.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end + -end % ALIGNMENT
        if offset > end:  # the format has no gaps
            header[f"padding {end}"] = {"dtype": "U8", "shape": [offset - end], "data_offsets": [end, offset]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            dense = tensor.detach().cpu().contiguous()
            file.write(dense.flatten().view(torch.uint8).numpy().data)
            file.write(bytes(-tensor.nbytes % ALIGNMENT))
        return file.tell()
