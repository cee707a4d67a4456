"""The likeliest tokens of rows, the same in every run: of equally likely ones, those with the lowest ids, in order."""

import torch
from torch import Tensor

from quire.ops.eager.token_order import ordered_keys


def likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Finds the `count` greatest of each row of `values` [num_rows, vocab_size] float32, the greatest first.

    torch.topk chooses any of several equal values, another one with other kernels or numbers of threads.

    Returns the values and the ids, [num_rows, count] each, int64.
    """
    if not count:
        return values.new_empty(len(values), 0), values.new_empty(len(values), 0, dtype=torch.int64)
    if values.is_cuda:  # where looking for ties would make the host wait
        return _of_keys(values, ordered_keys(values).topk(count, dim=-1).indices)
    found, ids = values.topk(count, dim=-1)
    (tied,) = torch.where((values >= found[:, -1:]).sum(-1) != count)  # a NaN is greater than any number to topk alone
    if len(tied):
        ids[tied] = ordered_keys(values[tied]).topk(count, dim=-1).indices
    ids = ids.sort(-1).values
    return _of_keys(values, ids.gather(1, values.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices))


def _of_keys(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return values.gather(1, ids), ids
