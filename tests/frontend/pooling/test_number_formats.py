"""Numbers as bytes are those of torch, and of `struct` for the order of bytes."""

import struct

import numpy as np
import pytest
import torch

from quire.frontend.pooling.number_formats import BYTES_PER_NUMBER, EmbedDtype, number_bytes

DTYPES: dict[EmbedDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def numbers() -> np.ndarray:
    """Random numbers, and all 16-bit floats, which are the halves between the 8-bit ones as well."""
    drawn = np.random.default_rng(0).normal(size=1001) * 10.0 ** np.arange(-500, 501).clip(-8, 6)
    half = np.arange(2**16, dtype=np.uint16).view(np.float16)
    brain = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    found = np.concatenate(
        [drawn, half[np.isfinite(half)], brain[np.isfinite(brain)], [0.0, -0.0, 479.9, 464.0, 464.1]]
    )
    return found.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_as_torch_rounds_them(dtype: EmbedDtype) -> None:
    values = numbers()
    kind = DTYPES[dtype]
    expected = torch.from_numpy(values).to(kind)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[BYTES_PER_NUMBER[dtype]]
    found = torch.frombuffer(bytearray(number_bytes(values, dtype, "little")), dtype=kind)
    same = (found.view(bits) == expected.view(bits)) | (found.float().isnan() & expected.float().isnan())
    assert same.all(), values[~same.numpy()][:5]


def test_the_order_of_bytes() -> None:
    values = np.array([1.5, -2.25, 3e-5], np.float32)
    assert number_bytes(values, "float32", "big") == struct.pack(">3f", *values)
    assert number_bytes(values, "float32", "little") == struct.pack("<3f", *values)
    assert number_bytes(values, "float32", "native") == struct.pack("=3f", *values)
    assert number_bytes(values, "float16", "big") == struct.pack(">3e", *values)
    assert number_bytes(values, "bfloat16", "big")[:2] == b"\x3f\xc0"
    assert number_bytes(values.reshape(3, 1), "fp8_e5m2", "big") == number_bytes(values, "fp8_e5m2", "little")
