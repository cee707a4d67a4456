"""Random values as a function of (seed, position).

There is no generator and no state. So a token depends only on its request, not on its batch, and a request that was
preempted or moved to another engine repeats itself exactly. The C++ kernel has the same formula
(`cpu/kernels/sampling.cpp`).
"""

import numpy as np
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014): element `position` of
# the sequence mix(start + position * gamma). The start is a hash of the seed, so that neighbouring seeds lie far apart.
# Seeds and outputs have different mixers: _OUTPUT are the paper's constants, _SEED those of MurmurHash3's finalizer.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_OUTPUT = (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
_SEED = (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)


def start_of(seeds: np.ndarray) -> np.ndarray:
    """Computes the start of each seed's sequence, for `uniforms`: [n] uint64 → [n] uint64."""
    return _mix(seeds + _GAMMA, _SEED)


def uniforms(starts: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Computes a value in [0, 1) for each (start, position): [n] uint64 and [n] int64 → [n] float64 with 53 random
    bits.
    """
    bits = _mix(starts + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA, _OUTPUT)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(value: np.ndarray, constants: tuple[int, int, int, int, int]) -> np.ndarray:
    shift1, multiplier1, shift2, multiplier2, shift3 = (np.uint64(constant) for constant in constants)
    value = (value ^ (value >> shift1)) * multiplier1
    value = (value ^ (value >> shift2)) * multiplier2
    return value ^ (value >> shift3)


def uniforms_of(starts: Tensor, positions: Tensor) -> Tensor:
    """Computes `uniforms` on a device: [n] int64, with the bits of the starts, and [n] int64 → [n] float64."""
    bits = starts + (positions + 1) * _signed(_GAMMA)  # int64 wraps as uint64 does
    shift1, multiplier1, shift2, multiplier2, shift3 = _OUTPUT
    bits = (bits ^ _shifted(bits, shift1)) * _signed(multiplier1)
    bits = (bits ^ _shifted(bits, shift2)) * _signed(multiplier2)
    return _shifted(bits ^ _shifted(bits, shift3), 11).double() * 2.0**-53


def _shifted(value: Tensor, places: int) -> Tensor:
    """Shifts to the right without the sign, which torch's shift would repeat."""
    return (value >> places) & ((1 << 64 - places) - 1)


def _signed(constant: int | np.uint64) -> int:
    return (int(constant) ^ 1 << 63) - (1 << 63)
