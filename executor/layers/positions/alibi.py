"""Biases that fall with distance (ALiBi, arXiv:2108.12409)."""

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Computes the slopes [num_heads] float32 as the paper's code does (arXiv:2108.12409).

    They are a geometric sequence. Heads beyond a power of two get every other member of the next finer sequence.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    coarse = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    fine = [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (num_heads - power), 2)]
    return torch.tensor(coarse + fine)


def distance_slopes(num_heads: int, num_tokens: int) -> Tensor:
    """Computes the biases of both directions in sequences of `num_tokens`, as `AttentionForm.distance_bias`."""
    reach = max(1, num_tokens - 1)
    return -alibi_slopes(num_heads).unsqueeze(1) * torch.arange(-reach, reach + 1).abs()
