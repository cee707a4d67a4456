"""What every model takes, and what the model runner sees of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from quire.executor.weights import WeightReader
from quire.ops import AttentionBatch, Backend
from torch import Tensor

if TYPE_CHECKING:
    from quire.executor.parallel import ParallelGroup


@dataclass(frozen=True)
class ModelContext:
    """What layers need to build themselves on one rank."""

    ops: Backend
    group: "ParallelGroup"
    dtype: torch.dtype
    device: torch.device
    weights: WeightReader
    max_model_len: int  # tokens; NTK-scaled rotary embeddings stretch to it


class Model(Protocol):
    """A decoder on one rank. All sizes are this rank's own."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def forward(self, token_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], batch: AttentionBatch) -> Tensor:
        """Hidden states [num_tokens, hidden] of one step; writes the new keys and values into `kv_caches`.

        `token_ids` and `positions` are [num_tokens] int64; `kv_caches` has one tensor a layer.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [num_sampled, hidden] → logits [num_sampled, vocab_size] over the whole vocabulary, on every rank."""
        ...
