"""Returns freed memory to the system while a model is built, after its weights were read and packed.

Weights that stay lie between freed ones, and the next layer does not always fill the gaps. Without this
module a start needs half as much memory again as the model.
"""

from torch import Tensor

from quire import ops

STEP_BYTES = 32 << 20
"""Bytes between two returns. With less, the system hands out the same memory again, which takes more time than it
saves.
"""


class FreedMemory:
    """Counts the bytes that a reader hands out, and returns freed memory after each `STEP_BYTES`."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def counted(self, tensor: Tensor) -> Tensor:
        """Counts and returns a tensor that was just read into host memory. Earlier ones may be freed by now."""
        self._num_bytes += tensor.nbytes
        if self._num_bytes >= STEP_BYTES:
            self._num_bytes = 0
            ops.settle("cpu")
        return tensor
