"""Sounds that a program gives as arrays."""

from typing import TYPE_CHECKING, Any, NamedTuple

from quire.core.errors import ParameterError

if TYPE_CHECKING:
    import numpy as np


class Samples(NamedTuple):
    """Samples of one channel.

    Attributes:
        data: float32, little-endian, [num_samples].
        rate: samples a second; 0: the model's own.
    """

    data: bytes
    rate: int


def is_sound(value: Any) -> bool:
    """Returns True for one sound: an array, a pair of samples and their rate, or numbers."""
    if isinstance(value, list | tuple):
        return bool(value) and (_is_pair(value) or all(isinstance(each, int | float) for each in value))
    return value is not None


def read_samples_of(value: Any, param: str) -> Samples:
    """The samples of a pair (samples, samples a second), or those of the model's rate alone.

    Raises:
        ParameterError: the value has another form.
    """
    if not _is_pair(value):
        return Samples(_mono(value, param).tobytes(), 0)
    samples, rate = value
    rate = rate.item() if hasattr(rate, "item") else rate
    if not isinstance(rate, int | float) or rate != int(rate) or rate < 1:
        raise ParameterError(f"{param} has {rate!r} samples a second; give a whole number.", param=param)
    return Samples(_mono(samples, param).tobytes(), int(rate))


def _is_pair(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    has_rate = isinstance(value[1], int | float) or getattr(value[1], "ndim", None) == 0
    return has_rate and not isinstance(value[0], int | float)


def _mono(value: Any, param: str) -> "np.ndarray":
    """Samples of one channel, [n] float32; those of several are mixed."""
    import numpy as np  # imported here, because most servers do without

    if hasattr(value, "detach"):  # a tensor of torch
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind != "f" or array.ndim not in (1, 2) or not array.size:
        raise ParameterError(
            f"{param} must be samples from -1 to 1 as floats, of one or two dimensions, got an array of "
            f"{array.dtype} with the shape {list(array.shape)}.",
            param=param,
        )
    if array.ndim == 2:
        array = array.mean(axis=int(array.shape[0] >= array.shape[1]))  # channels are fewer than samples
    return np.ascontiguousarray(array, "<f4")
