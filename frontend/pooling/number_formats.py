"""Numbers of vectors as bytes: the formats that clients may ask for."""

import functools
import sys
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]

BYTES_PER_NUMBER: dict[EmbedDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def number_bytes(values: "np.ndarray", dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """The numbers of an array, row by row, each rounded to the nearest of its format; halves go to the even one.

    Args:
        values: float32.
    """
    rounded = _rounded(values, dtype)
    if endianness not in ("native", sys.byteorder):
        rounded = rounded.byteswap()
    return rounded.tobytes()


def _rounded(values: "np.ndarray", dtype: EmbedDtype) -> "np.ndarray":
    """The numbers of a format; those that NumPy lacks are integers with the same bits."""
    import numpy as np  # imported here, because most servers do without

    match dtype:
        case "float32":
            return values
        case "float16":
            with np.errstate(over="ignore"):
                return values.astype(np.float16)
        case "bfloat16":
            bits = np.ascontiguousarray(values).view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        case "fp8_e4m3" | "fp8_e5m2":
            return _eight_bits(values, dtype)


def _eight_bits(values: "np.ndarray", dtype: Literal["fp8_e4m3", "fp8_e5m2"]) -> "np.ndarray":
    """The codes of eight bits: the sign, then the place among the format's magnitudes."""
    import numpy as np

    midpoints = _midpoints(dtype)
    magnitudes = np.abs(values)
    codes = np.searchsorted(midpoints, magnitudes)
    ties = (codes < len(midpoints)) & (midpoints[np.minimum(codes, len(midpoints) - 1)] == magnitudes)
    codes += ties & (codes % 2 == 1)
    return (codes + 128 * np.signbit(values)).astype(np.uint8)


@functools.cache
def _midpoints(dtype: Literal["fp8_e4m3", "fp8_e5m2"]) -> "np.ndarray":
    """The numbers halfway between neighbouring magnitudes of a format, float32.

    The last magnitude stands for all that is too large: 448 in E4M3, infinity in E5M2, as in torch.
    """
    import numpy as np

    mantissa_bits, bias, largest_code = (3, 7, 0x7E) if dtype == "fp8_e4m3" else (2, 15, 0x7C)
    codes = np.arange(largest_code + 1)
    exponents, fractions = codes >> mantissa_bits, (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    normal = exponents > 0
    magnitudes = np.ldexp(fractions + normal, np.maximum(exponents, 1) - bias)
    return ((magnitudes[1:] + magnitudes[:-1]) / 2).astype(np.float32)
