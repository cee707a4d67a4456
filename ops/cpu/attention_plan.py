"""One step's rows in the attention kernels' form."""

import numpy as np
from torch import Tensor

from quire.ops.eager.attention_plan import AttentionPlan


class NativePlan(AttentionPlan):
    """One step's rows in the kernels' form. Groups are formed only if plain torch computes the attention."""

    def __init__(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_tables: np.ndarray,
        slot_mapping: Tensor,
        block_size: int,
        prefix_spans: np.ndarray | None = None,
    ) -> None:
        super().__init__(query_lens, seq_lens, block_tables, slot_mapping, block_size, prefix_spans)
        self.query_lens = np.ascontiguousarray(query_lens, np.int64)
        self.seq_lens = np.ascontiguousarray(seq_lens, np.int64)
        self.block_tables = np.ascontiguousarray(block_tables, np.int32)
        if prefix_spans is not None:
            self.prefix_spans = np.ascontiguousarray(prefix_spans, np.int64)
