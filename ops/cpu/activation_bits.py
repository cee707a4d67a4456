"""How many bits activations keep where they are multiplied by codes of few bits (`kernels/words.h`)."""

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
    """The rule, which holds for every step of a process: a row's result does not depend on how many rows there are.

    Activations of float32 stay what they are. Beside integers, others become integers of 8 bits where the weight's
    makers rounded them so, or where its codes have four bits, whose own rounding is far greater, if the processor has
    an instruction for that. Else they become integers of 16 bits. Beside other codes bfloat16 stays bfloat16, to which
    the numbers of a table are rounded where there are products of bfloat16, and float16 becomes float32.
    """

    def __init__(self, kernels: ctypes.CDLL, asked: int | None = None) -> None:
        """`kernels` comes from `quire.ops.cpu.libraries`; `asked` is 8 or 16 for all weights, None for the rule."""
        least = kernels["quire_least_activation_bits"]
        least.argtypes, least.restype = [], ctypes.c_int
        self._least = least()
        self._asked = asked
        self._said: set[str] = set()

    @classmethod
    def asked(cls, kernels: ctypes.CDLL) -> "ActivationBits":
        """As the environment variable `QUIRE_CPU_ACTIVATION_BITS` says.

        Raises:
            ValueError: it is neither 8 nor 16.
        """
        text = os.environ.get("QUIRE_CPU_ACTIVATION_BITS", os.environ.get("VLLM_CPU_ACTIVATION_BITS", ""))
        if text and text not in map(str, _CHOICES):
            raise ValueError(f"QUIRE_CPU_ACTIVATION_BITS must be 8 or 16, got {text!r}.")
        return cls(kernels, int(text) if text else None)

    def of(self, dtype: torch.dtype, codec: int, *, has_byte_inputs: bool) -> int:
        """Bits of `x` of `dtype` beside codes of a `CodecNumber`; 32: float32."""
        if dtype == torch.bfloat16 and codec in _BFLOATS:
            return 16
        if dtype == torch.float32 or codec not in _CODE_BITS:
            return 32
        best = 8 if has_byte_inputs or codec == INT4 else 16
        return max(self._asked or best, self._least)

    def say(self, codec: int, *, has_byte_inputs: bool, is_dry: bool) -> None:
        """Logs once what becomes of activations beside a weight's codes, unless nothing does, or it `is_dry`."""
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
