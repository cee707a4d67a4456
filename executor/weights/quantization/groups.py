"""Groups of neighbouring inputs that share a scale.

In a checkpoint the last group may be shorter. All groups of a `QuantizedWeight` have one size.
"""

import math

from torch import Tensor

MX_GROUP, NV_GROUP = 32, 16
"""Inputs of a group of MXFP4 and the other MX formats (OCP Microscaling Formats, version 1.0), and of NVFP4."""


def num_groups_of(size: int, group: int) -> int:
    """Counts the groups of `group` inputs in `size` inputs; 0 or less means one group."""
    return 1 if group < 1 else -(-size // group)


def find_group(size: int, num_groups: int, expected: int | None) -> int | None:
    """Finds the inputs of each of `num_groups` groups of `size` inputs; None: there are no such groups.

    A short last group makes several answers possible, so the configuration's is tried first. Otherwise, where single
    layers have other groups, the size is a power of two, as in all tools that write them.

    Args:
        expected: the configuration's group size; None: it has none; 0 or less: one group.
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


def equal_groups(numbers: Tensor, size: int, group: int) -> Tensor:
    """Repeats each value of `numbers` [out, groups] so that all groups have one size.

    Args:
        size: inputs of all groups.
        group: inputs of each but the last.
    """
    if size % group == 0:
        return numbers
    part = math.gcd(group, size)
    return numbers.repeat_interleave(group // part, 1)[:, : size // part].contiguous()
