"""The sampler's view of the worker's requests: tokens by slot and position, without the pages of their keys."""

from typing import Protocol

import numpy as np
import torch


class TokenTable(Protocol):
    """Slot-indexed rows of every running request, implemented by `executor/step/request_table.py`.

    Attributes:
        device: of the token ids.
        token_ids: [max_num_seqs, columns] int32 on the device; known tokens at their positions.
        memory: [max_num_seqs * columns + 2] int32; that of `token_ids`, and two spare places.
        num_prompt_tokens: [max_num_seqs] int32.
        num_unnamed: [max_num_seqs] int32; leading tokens that are given as embeddings and have no valid ids.
    """

    device: torch.device
    token_ids: torch.Tensor
    memory: torch.Tensor
    num_prompt_tokens: np.ndarray
    num_unnamed: np.ndarray

    def gather(self, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Token ids at (slot, position) pairs: [n] and [n] to [n] int64 on the device."""
