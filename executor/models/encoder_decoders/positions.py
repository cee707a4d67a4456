"""Sinusoids as rows of positions (arXiv:1706.03762, 3.5), in the two orders that checkpoints imply."""

import math

import torch
from torch import Tensor


def interleaved_sinusoids(num_positions: int, size: int) -> Tensor:
    """Returns [num_positions, size] float32: column pairs of one frequency, all sines before all cosines.

    The frequency of pair i is `10000 ** (-2i / size)`.
    """
    positions = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1)
    columns = torch.arange(size, dtype=torch.float64)
    angles = positions / 10000 ** (2 * (columns // 2) / size)
    return torch.cat((angles[:, 0::2].sin(), angles[:, 1::2].cos()), dim=1).float()


def spread_sinusoids(num_positions: int, size: int) -> Tensor:
    """Returns [num_positions, size] float32: sines, then cosines, of `size / 2` frequencies from 1 to 1/10000."""
    half = size // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(num_positions).float().unsqueeze(1) * frequencies
    rows = torch.cat((angles.sin(), angles.cos()), dim=1)
    return torch.nn.functional.pad(rows, (0, size % 2))
