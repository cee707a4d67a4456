"""Reads prompts that come as embeddings: safetensors bytes over HTTP, arrays and tensors from a program.

Values are read as bit patterns only, so no torch is needed. Clients' bytes are never unpickled.
"""

import binascii
import sys
from base64 import b64decode
from hashlib import sha256
from typing import Any, get_args

import numpy as np
from safetensors import SafetensorError, deserialize

from quire.core.errors import ParameterError
from quire.core.wire.protocol import EmbedsType, PromptEmbeds
from quire.frontend.requests.prompt import MAX_EMBEDS_BYTES

_MAX_HEADER_BYTES = 2**16
_TYPES: dict[str, EmbedsType] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Types of embeddings by their names in safetensors files."""

_BITS: dict[EmbedsType, tuple[str, int]] = {
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
    "float32": ("<u4", 0x7F800000),
}
"""Each type as little-endian integers, and the bits of its exponent, which are all set only in NaN and infinity."""


class EmbedsReader:
    """Checks embeddings against one model.

    Args:
        hidden_size: elements in a row, as in the model.
    """

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size

    def read(self, value: Any, max_model_len: int) -> tuple[PromptEmbeds, int]:
        """Reads (rows, number of rows). Each row replaces one token.

        Args:
            value: [num_tokens, hidden] as base64 or bytes of a safetensors file with one tensor, as a NumPy array or
                as a torch tensor; a first dimension of 1 is dropped.
            max_model_len: limit on the number of tokens.

        Raises:
            ParameterError: `value` has none of these forms, is too large, or contains NaN or infinity.
        """
        if isinstance(value, str):
            value = self._decode(value, max_model_len)
        if isinstance(value, bytes):
            dtype, shape, rows = self._read_file(value, max_model_len)
        else:
            dtype, shape, rows = _read_array(value)
        num_tokens = self._num_tokens(shape, max_model_len)
        _check_finite(dtype, rows)
        return PromptEmbeds(dtype, rows, _digests(dtype, rows, num_tokens)), num_tokens

    def _max_bytes(self, max_model_len: int) -> int:
        return min(MAX_EMBEDS_BYTES, max_model_len * self._hidden_size * 4) + _MAX_HEADER_BYTES + 8

    def _decode(self, text: str, max_model_len: int) -> bytes:
        self._check_size(len(text) * 3 // 4 - 2, max_model_len)  # up to two of the last three bytes are padding
        try:
            return b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise _wrong("is not base64") from None

    def _check_size(self, num_bytes: int, max_model_len: int) -> None:
        if num_bytes > (limit := self._max_bytes(max_model_len)):
            raise _wrong(
                f"has {num_bytes} bytes, and {limit} are more than {max_model_len} tokens (max_model_len) of "
                f"{self._hidden_size} values need; send fewer tokens"
            )

    def _read_file(self, data: bytes, max_model_len: int) -> tuple[EmbedsType, tuple[int, ...], bytes]:
        self._check_size(len(data), max_model_len)
        if int.from_bytes(data[:8], "little") > _MAX_HEADER_BYTES:
            raise _wrong(f"is no safetensors file, or has a header of more than {_MAX_HEADER_BYTES} bytes")
        try:
            tensors = deserialize(data)
        except SafetensorError as error:
            raise _wrong(f"is no safetensors file ({str(error)[:200]})") from None
        if len(tensors) != 1:
            raise _wrong(f"must hold one tensor, and holds {len(tensors)}; send a list for several prompts")
        [(_, tensor)] = tensors
        if tensor["dtype"] not in _TYPES:
            raise _wrong(f"is of type {tensor['dtype']}; send float16, bfloat16 or float32")
        return _TYPES[tensor["dtype"]], tuple(tensor["shape"]), bytes(tensor["data"])

    def _num_tokens(self, shape: tuple[int, ...], max_model_len: int) -> int:
        if len(shape) == 3 and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != 2 or shape[1] != self._hidden_size:
            raise _wrong(f"has the shape {list(shape)}; this model takes [number of tokens, {self._hidden_size}]")
        if not 0 < shape[0] < max_model_len:
            raise _wrong(
                f"has {shape[0]} tokens; at least one is needed, and at most {max_model_len - 1} leave room for output "
                "(max_model_len)"
            )
        return shape[0]


def _read_array(value: Any) -> tuple[EmbedsType, tuple[int, ...], bytes]:
    torch = sys.modules.get("torch")  # a caller with a tensor has torch loaded
    if torch is not None and isinstance(value, torch.Tensor):
        name, value = str(value.dtype).removeprefix("torch."), value.detach().cpu().contiguous()
        array = value.view(torch.int16).numpy() if name == "bfloat16" else value.numpy()
    elif isinstance(value, np.ndarray):
        name, array = value.dtype.name, value
    else:
        raise _wrong(f"must be safetensors bytes (over HTTP, in base64), an array or a tensor, not {_name(value)}")
    if name not in get_args(EmbedsType):
        raise _wrong(f"is of type {name}; convert it to float16, bfloat16 or float32")
    dtype: EmbedsType = name  # type: ignore[assignment]
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return dtype, array.shape, array.tobytes()


def _name(value: Any) -> str:
    return type(value).__name__


def _check_finite(dtype: EmbedsType, rows: bytes) -> None:
    integers, exponent = _BITS[dtype]
    size = 2**20  # per slice: a mask of a long prompt would be as large as the prompt
    bits = np.frombuffer(rows, integers)
    for start in range(0, len(bits), size):
        if (bits[start : start + size] & exponent == exponent).any():
            raise _wrong("holds NaN or infinity")


def _digests(dtype: EmbedsType, rows: bytes, num_tokens: int) -> bytes:
    """The digest of each row that enters the hashes of blocks: SHA-256 over its type and its bytes."""
    kind, width = sha256(dtype.encode()), len(rows) // num_tokens
    digests = bytearray()
    view = memoryview(rows)
    for start in range(0, len(rows), width):
        digest = kind.copy()
        digest.update(view[start : start + width])
        digests += digest.digest()
    return bytes(digests)


def _wrong(what: str) -> ParameterError:
    return ParameterError(f"prompt_embeds {what}.", param="prompt_embeds")
