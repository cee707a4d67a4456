"""Divides a long sound into clips at quiet places."""

import numpy as np

_SEARCHED = 1 / 6
"""The part of a clip, from its end, in which a quiet place is looked for."""
_WINDOW_SECONDS = 0.1
_STEP_SECONDS = 0.01


def clip_starts(samples: np.ndarray, rate: int, longest: int) -> list[int]:
    """The first sample of each clip of a sound [n]; no clip has more than `longest` samples.

    A clip ends in the middle of the quietest tenth of a second near its longest end.
    """
    starts = [0]
    while len(samples) - starts[-1] > longest:
        starts.append(starts[-1] + first_clip(samples[starts[-1] : starts[-1] + longest], rate, longest))
    return starts


def first_clip(samples: np.ndarray, rate: int, longest: int) -> int:
    """The number of samples in the first clip of a longer sound, of which the first `longest` are here."""
    begin = longest - max(1, int(longest * _SEARCHED))
    return begin + _quietest(samples[begin:longest], rate)


def _quietest(samples: np.ndarray, rate: int) -> int:
    """The middle of the window with the least energy; the last of several."""
    window = min(len(samples), max(1, int(rate * _WINDOW_SECONDS)))
    energy = np.concatenate(([0.0], np.cumsum(np.square(samples, dtype=np.float64))))
    first = np.arange(0, len(samples) - window + 1, max(1, int(rate * _STEP_SECONDS)))
    sums = energy[first + window] - energy[first]
    return int(first[len(sums) - 1 - np.argmin(sums[::-1])]) + max(1, window // 2)
