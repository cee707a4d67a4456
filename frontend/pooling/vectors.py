"""Vectors in answers: as numbers in JSON, in base64, or as plain bytes, each made of the vector's buffer at once."""

import binascii
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Raw, Struct

from quire.core.errors import ParameterError
from quire.frontend.pooling.number_formats import EmbedDtype, Endianness, number_bytes

if TYPE_CHECKING:
    import numpy as np

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]

MAX_HEADER_BYTES = 2**16
"""Longest header that usual clients read: Python's `http.client` and `requests` among them."""

_encode = msgspec.json.Encoder().encode


def json_numbers(values: "np.ndarray") -> Any:
    """A vector or a matrix as JSON, with nine or ten digits a number: nine tell every float32 from its neighbours."""
    return Raw(_encode(_shortened(values).tolist()))


def _shortened(values: "np.ndarray") -> "np.ndarray":
    """The float64 numbers whose shortest decimals have few digits, and are rounded to `values` as float32.

    A whole number divided by a power of ten, both exact, is the float64 number nearest to the decimal.
    """
    import numpy as np

    wide = values.astype(np.float64)
    powers = _powers().take(np.frexp(wide)[1] + _SMALLEST_EXPONENT)
    short = np.rint(wide * powers) / powers
    return np.where(np.isnan(short), wide, short)


_SMALLEST_EXPONENT = 150


@functools.cache
def _powers() -> "np.ndarray":
    """The power of ten by which numbers with a binary exponent of -150 and more have nine digits or ten before the
    point; NaN where it, or a whole number, would not be exact."""
    import numpy as np

    exponents = np.arange(-_SMALLEST_EXPONENT, 129)
    digits = 8 - np.floor((exponents - 1) * math.log10(2))
    return np.where((digits >= 0) & (digits <= 22), 10.0 ** digits.clip(0, 22), np.nan)


def base64_text(values: "np.ndarray", dtype: EmbedDtype, endianness: Endianness) -> Raw:
    """A vector as a JSON string of base64."""
    return Raw(b'"%b"' % binascii.b2a_base64(number_bytes(values, dtype, endianness), newline=False))


def json_writer(format: EncodingFormat, dtype: EmbedDtype, endianness: Endianness) -> Callable[["np.ndarray"], Any]:
    """The function that writes a vector into a JSON answer."""
    if format == "float":
        return json_numbers
    return lambda values: base64_text(values, dtype, endianness)


class _Place(Struct, kw_only=True):
    """The place of one vector among the bytes."""

    index: int
    embed_dtype: EmbedDtype
    endianness: Endianness
    start: int
    end: int
    shape: tuple[int, ...]


class VectorBytes(Struct, kw_only=True):
    """An answer of plain bytes. With `encoding_format` "bytes", the header `metadata` has all the rest, as JSON."""

    content: bytes
    headers: dict[str, str]


def plain_bytes(
    vectors: Sequence["np.ndarray"],
    dtype: EmbedDtype,
    endianness: Endianness,
    facts: dict[str, Any] | None,
) -> VectorBytes:
    """Vectors one after the other.

    Args:
        facts: the answer's other fields; None leaves all but the vectors out.

    Raises:
        ParameterError: the places of so many vectors do not fit into a header.
    """
    parts = [number_bytes(vector, dtype, endianness) for vector in vectors]
    if facts is None:
        return VectorBytes(content=b"".join(parts), headers={})
    places, start = [], 0
    for index, (vector, part) in enumerate(zip(vectors, parts, strict=True)):
        end = start + len(part)
        places.append(
            _Place(
                index=index, embed_dtype=dtype, endianness=endianness, start=start, end=end, shape=tuple(vector.shape)
            )
        )
        start = end
    metadata = _encode({**facts, "data": places})
    if len(metadata) > MAX_HEADER_BYTES:
        raise ParameterError(
            f"encoding_format bytes describes the vectors in a header, and that of {len(vectors)} vectors would have "
            f"{len(metadata)} bytes, more than the {MAX_HEADER_BYTES} that clients read; ask for bytes_only, or send "
            "fewer inputs.",
            param="encoding_format",
        )
    return VectorBytes(content=b"".join(parts), headers={"metadata": metadata.decode()})
