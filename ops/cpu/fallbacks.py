"""Warnings about work that has no kernel and runs on a slower path: one for each reason, at its first occurrence."""

import logging
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar

from torch import Tensor

from quire.ops.quantized import QuantizedWeight

logger = logging.getLogger(__name__)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Fallbacks:
    """Logs each reason once.

    Attributes:
        has_quantized: most linear layers have quantized weights, so messages about others concern few layers.
    """

    def __init__(self) -> None:
        self._said: set[Hashable] = set()
        self.has_quantized = False

    def say(self, reason: str) -> None:
        """Logs as a warning why linear layers are slow, unless that has been logged, or concerns few layers."""
        if reason not in self._said and not self.has_quantized:
            self._said.add(reason)
            logger.warning(reason)

    def say_of_quantized(self, weight: QuantizedWeight) -> None:
        """Logs that there is no kernel for weights of this kind, once for each kind."""
        kind = (weight.codes.dtype, weight.table is None, weight.scales.shape[1] == 1)
        if kind not in self._said:
            self._said.add(kind)
            bits = 8 if weight.table is None else 4
            logger.warning(
                "%d-bit weights (%s, one scale for %d values) are dequantized by plain torch, which is slow.",
                bits, str(weight.codes.dtype).removeprefix("torch."), weight.group_size,
            )  # fmt: skip

    def run(
        self,
        operation: Callable[_Parameters, _Result],
        *args: _Parameters.args,
        **kwargs: _Parameters.kwargs,
    ) -> _Result:
        """Runs an operation of plain torch instead of a kernel; warns once for each combination of dtypes."""
        result = operation(*args, **kwargs)  # before the warning: if torch raises too, the caller's arguments are wrong
        tensors = [value for value in args if isinstance(value, Tensor)]
        key = (operation.__name__, *(tensor.dtype for tensor in tensors))
        if key not in self._said:
            self._said.add(key)
            forms = ", ".join(_form(tensor) for tensor in tensors)
            logger.warning(
                "%s runs in plain torch, which is slower: the kernel does not take %s.", operation.__name__, forms
            )
        return result


def _form(tensor: Tensor) -> str:
    layout = "" if tensor.is_contiguous() else " with gaps"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{layout}"
