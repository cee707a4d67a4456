"""Tokens by their values: of equal ones, those with the lowest ids come first, in every run."""

import torch
from torch import Tensor


def ordered_keys(values: Tensor) -> Tensor:
    """Integers in the order of `values` [num_rows, vocab_size] float32, and of the ids downwards where they are equal.

    No two of a row are equal, so that sorts and `torch.topk` have one result.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: there are two zeros
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    ids = torch.arange(values.shape[-1], device=values.device)
    return (ordered << 32) - ids
