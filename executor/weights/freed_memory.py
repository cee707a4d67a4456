"""Gives back to the system, while a model is built, the memory of weights that were read, packed and forgotten.

What is kept of each layer lies between what is freed of it, in pieces that the next layer does not always fill. So a
start would need half as much memory again as the model does.
"""

from torch import Tensor

from quire import ops

STEP_BYTES = 32 << 20
"""Less would have the system hand out the same memory again and again, which costs more time than it saves memory."""


class FreedMemory:
    """Counts what a reader hands out, and returns freed memory after each `STEP_BYTES` of it."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def counted(self, tensor: Tensor) -> Tensor:
        """The tensor, which was just read into the host's memory. What was read before it may be freed by now."""
        self._num_bytes += tensor.nbytes
        if self._num_bytes >= STEP_BYTES:
            self._num_bytes = 0
            ops.settle("cpu")
        return tensor
