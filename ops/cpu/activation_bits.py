"""Chooses the precision of activations that are multiplied by quantized weights (`kernels/words.h`)."""

import ctypes
import logging
import os

import torch

from quire.ops.cpu.codecs import E4M3, E5M2, INT4, INT8, TABLE4

logger = logging.getLogger(__name__)

_CHOICES = (8, 16)
_CODE_BITS = {INT8: 8, INT4: 4}
_BFLOATS = {E4M3, E5M2, TABLE4}


class ActivationBits:
    """The rule for all steps of a process, so that a row's result does not depend on the number of rows.

    float32 activations stay float32. With integer weights, others are quantized to int8 if the weight's makers did so,
    or if the weight has 4-bit codes, whose own rounding error is far greater, and the processor has an instruction for
    it. Otherwise they are quantized to int16. With other codes bfloat16 stays bfloat16, to which the values of a table
    are rounded if the processor multiplies bfloat16, and float16 becomes float32.
    """

    def __init__(self, kernels: ctypes.CDLL, asked: int | None = None) -> None:
        """Takes the library as `kernels`; `asked` is 8 or 16 for all weights, None for the rule."""
        least = kernels["quire_least_activation_bits"]
        least.argtypes, least.restype = [], ctypes.c_int
        self._least = least()
        self._asked = asked
        self._said: set[str] = set()

    @classmethod
    def asked(cls, kernels: ctypes.CDLL) -> "ActivationBits":
        """Builds it from the environment variable `QUIRE_CPU_ACTIVATION_BITS`.

        Raises:
            ValueError: it is neither 8 nor 16.
        """
        text = os.environ.get("QUIRE_CPU_ACTIVATION_BITS", os.environ.get("VLLM_CPU_ACTIVATION_BITS", ""))
        if text and text not in map(str, _CHOICES):
            raise ValueError(f"QUIRE_CPU_ACTIVATION_BITS must be 8 or 16, got {text!r}.")
        return cls(kernels, int(text) if text else None)

    def of(self, dtype: torch.dtype, codec: int, *, has_byte_inputs: bool) -> int:
        """Returns the bits of `x` of `dtype` with weights of a `CodecNumber`; 32: float32."""
        if dtype == torch.bfloat16 and codec in _BFLOATS:
            return 16
        if dtype == torch.float32 or codec not in _CODE_BITS:
            return 32
        best = 8 if has_byte_inputs or codec == INT4 else 16
        return max(self._asked or best, self._least)

    def say(self, codec: int, *, has_byte_inputs: bool, is_dry: bool) -> None:
        """Logs once how activations are rounded for a weight's codec, unless they are not, or if it `is_dry`."""
        if is_dry or codec not in _CODE_BITS:
            return
        bits, beside = self.of(torch.bfloat16, codec, has_byte_inputs=has_byte_inputs), _CODE_BITS[codec]
        if bits == 8:
            self._log(f"Activations are rounded to 8 bits beside {beside}-bit weights (QUIRE_CPU_ACTIVATION_BITS).")
        elif self._asked == 8:
            self._log(f"Activations keep {bits} bits beside {beside}-bit weights: these kernels multiply no fewer.")

    def _log(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.info(text)
