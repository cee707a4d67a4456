"""Groups of neighbouring inputs that share a scale.

In checkpoints the last one may be shorter; those of a `QuantizedWeight` have one size.
"""

import math

from torch import Tensor

MX_GROUP, NV_GROUP = 32, 16
"""Inputs of a group, of MXFP4 and its kind (OCP Microscaling Formats, version 1.0), and of NVFP4."""


def num_groups_of(size: int, group: int) -> int:
    """How many groups of `group` inputs `size` inputs are; 0 and less: all are one group."""
    return 1 if group < 1 else -(-size // group)


def find_group(size: int, num_groups: int, expected: int | None) -> int | None:
    """Inputs of each of `num_groups` groups of `size` inputs; None: there are no such groups.

    A short last group makes several answers possible, so the configuration's is taken first. Without it, that is where
    a checkpoint has other groups in some layers, sizes are powers of two as in all tools that write them.

    Args:
        expected: what the configuration says; None, or 0 and less: nothing, or one group.
    """
    if num_groups == 1:
        return size
    if expected is not None and expected > 0 and -(-size // expected) == num_groups:
        return expected
    if not 0 < num_groups <= size:
        return None
    power = 1 << (-(-size // num_groups) - 1).bit_length()
    if -(-size // power) == num_groups:
        return power
    return size // num_groups if size % num_groups == 0 else None


def even(numbers: Tensor, size: int, group: int) -> Tensor:
    """Numbers of groups, [out, groups], as those of groups of one size, each of which is repeated.

    Args:
        size: inputs of all groups.
        group: inputs of each but the last.
    """
    if size % group == 0:
        return numbers
    part = math.gcd(group, size)
    return numbers.repeat_interleave(group // part, 1)[:, : size // part].contiguous()
