"""The worker's requests as sampling sees them: tokens by slot and position, not the pages that hold their keys."""

from typing import Protocol

import numpy as np
import torch


class TokenTable(Protocol):
    """Slot-indexed rows of every request that runs. `executor/step/request_table.py` keeps them.

    Attributes:
        device: where token ids live.
        token_ids: [max_num_seqs, columns] int32 on the device; known tokens at their positions.
        num_prompt_tokens: [max_num_seqs] int32.
        num_unnamed: [max_num_seqs] int32; leading tokens that came as embeddings, so that their ids mean nothing.
    """

    device: torch.device
    token_ids: torch.Tensor
    num_prompt_tokens: np.ndarray
    num_unnamed: np.ndarray

    def gather(self, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Token ids at (slot, position) pairs: [n] and [n] to [n] int64 on the device."""
