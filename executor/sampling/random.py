"""Random numbers as a function of (seed, position), and the draw of a token with one of them.

Nothing hides in a generator's state: a token depends on its request alone, not on the batch that it was sampled in,
and a request that was preempted or moved to another engine repeats itself exactly.
"""

import numpy as np
import torch

# SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014): element `position` of
# the sequence mix(start + position * gamma). The start is the mixed seed, by another mixer than the output's, so that
# neighbouring seeds lie far apart. _OUTPUT are the paper's constants, _SEED those of MurmurHash3's finalizer.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_OUTPUT = (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
_SEED = (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)

_CHUNK = 512
"""Tokens per chunk of the two-level draw: running sums over chunks, then within one, instead of over the vocabulary."""


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, position): [n] uint64 and [n] int64 to [n] float64, of 53 random bits."""
    start = _mix(seeds + _GAMMA, _SEED)
    bits = _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA, _OUTPUT)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(value: np.ndarray, constants: tuple[int, int, int, int, int]) -> np.ndarray:
    shift1, multiplier1, shift2, multiplier2, shift3 = (np.uint64(constant) for constant in constants)
    value = (value ^ (value >> shift1)) * multiplier1
    value = (value ^ (value >> shift2)) * multiplier2
    return value ^ (value >> shift3)


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row by inverting the cumulative softmax; a token of probability zero is never drawn.

    Args:
        logits: [num_rows, vocab_size] float32; -inf for tokens that are out.
        uniform: [num_rows] float64 in [0, 1).

    Returns:
        Ids [num_rows] int64, and [num_rows] bool, false where the logits were no distribution (NaN, infinite).
    """
    weights = logits.softmax(-1)
    vocab_size = weights.shape[1]
    num_whole = vocab_size // _CHUNK
    sums = weights[:, : num_whole * _CHUNK].unflatten(1, (num_whole, _CHUNK)).sum(-1)
    tail = weights[:, num_whole * _CHUNK :].sum(-1, keepdim=True)
    sums = torch.cat([sums, tail], dim=1).double()
    total = sums.sum(-1)

    chunk, before = _invert(sums, uniform * total)
    index = chunk.unsqueeze(1) * _CHUNK + torch.arange(_CHUNK, device=logits.device)
    inside = weights.gather(1, index.clamp(max=vocab_size - 1)).double().masked_fill_(index >= vocab_size, 0)
    offset, _ = _invert(inside, uniform * total - before)
    token_ids = (chunk * _CHUNK + offset).clamp_(max=vocab_size - 1)
    return token_ids, total.isfinite() & (total > 0)


def _invert(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running sum of a row first exceeds `target`, and the sum before that place.

    Rounding may put the target at or past the end: the last place that has weight is taken then.
    """
    running = weights.cumsum(-1)
    first_above = torch.searchsorted(running, target.unsqueeze(1), right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    place = torch.minimum(first_above, last).clamp_(max=weights.shape[1] - 1)
    return place.squeeze(1), (running - weights).gather(1, place).squeeze(1)
