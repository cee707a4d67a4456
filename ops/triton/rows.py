"""The rows of a step on the device, as the kernels of attention read them."""

from typing import NamedTuple

from torch import Tensor


class PagedRows(NamedTuple):
    """The rows of one step and their pages. All tensors are on the device.

    A row without tokens is padding: it is neither read nor written. In a recorded step, the values change and the
    shapes and bounds do not.

    Attributes:
        query_starts: [num_rows + 1] int32; the new tokens of row r are the step's tokens from `query_starts[r]` to
            `query_starts[r + 1]`. In a decode step of padded rows, each has one, and `seq_lens` is 0 for padding.
        seq_lens: [num_rows] int32; tokens of each sequence, the new ones included; 0: padding.
        block_tables: [num_rows, max_blocks] int32, dense along the blocks; ids of a row's pages, in order. Entries past
            its last page, and before the pages that its tokens see, may be any values.
        slot_mapping: [num_tokens] int64; page * block_size + offset of each new token; -1: padding.
        prefix_spans: [num_rows, 2] int32, dense; as in `Backend.attention_batch`; None: there are none.
        block_size: tokens of a page.
        max_query_len: a bound on the new tokens of a row.
        max_seq_len: a bound on `seq_lens`.
        are_apart: as in `DeviceRows`.
    """

    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    prefix_spans: Tensor | None
    block_size: int
    max_query_len: int
    max_seq_len: int
    are_apart: bool = True
