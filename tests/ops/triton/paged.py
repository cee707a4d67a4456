"""The rows of a step on the device, from arrays on the host."""

import numpy as np
import torch

from quire.ops.triton.rows import PagedRows
from tests.ops.triton.conftest import DEVICE


def paged_rows(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    slot_mapping: torch.Tensor,
    block_size: int,
    prefix_lens: np.ndarray | None = None,
    max_seq_len: int | None = None,
) -> PagedRows:
    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(DEVICE)

    return PagedRows(
        query_starts=send(np.concatenate(([0], query_lens.cumsum()))),
        seq_lens=send(seq_lens),
        block_tables=send(block_tables),
        slot_mapping=slot_mapping.to(DEVICE),
        prefix_lens=None if prefix_lens is None else send(prefix_lens),
        block_size=block_size,
        max_query_len=int(query_lens.max()),
        max_seq_len=max_seq_len or int(seq_lens.max()),
    )
