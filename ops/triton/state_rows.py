"""The rows of recurrent operations, as kernels take them."""

import torch
from torch import Tensor

from quire.ops.recurrent import StateRows


def starts_there(x: Tensor, rows: StateRows) -> Tensor | None:
    """The rows' first tokens in `x`, and the end, on the device; None if each row has one token."""
    if len(x) == len(rows.starts) - 1:
        return None
    return rows.starts.to(x.device) if rows.starts_there is None else rows.starts_there


def with_dense_tokens(x: Tensor) -> Tensor:
    """`x` with dense tokens, which may lie apart."""
    return x if x[:1].is_contiguous() else x.contiguous()


def as_bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)
