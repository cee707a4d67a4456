"""Attention in both directions within the sequences of a step, as attention to pages of one token each.

Keys and values of a projection lie token by token, as pages do. So those that are not rotated are read where they are.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.ops.backend import AttentionBatch, AttentionForm, Backend, NewHeads

Batch = TypeVar("Batch", bound=AttentionBatch)


def batch_of_sequences(ops: Backend[Batch, Any, Any], lengths: np.ndarray, device: torch.device) -> Batch:
    """Runs `Backend.sequence_batch`: page i of a step is its token i."""
    lengths = np.asarray(lengths, np.int64)
    starts = np.cumsum(lengths) - lengths
    tables = (starts[:, None] + np.arange(lengths.max())).astype(np.int32)
    slots = torch.from_numpy(np.arange(lengths.sum())).to(device)
    spans = np.stack((np.zeros_like(lengths), lengths), axis=1)
    return ops.attention_batch(lengths, lengths, tables, slots, block_size=1, prefix_spans=spans)


def attend_sequences(
    ops: Backend[Batch, Any, Any],
    heads: Tensor,
    num_kv_heads: int,
    batch: Batch,
    form: AttentionForm,
    rotation: tuple[Tensor, Tensor] | None,
    norm: tuple[Tensor, float] | None,
    empty: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Runs `Backend.sequence_attention` by the backend's operations on pages, which `empty` allocates; None: torch."""
    num_tokens, num_all, head_dim = heads.shape
    form = form._replace(span_window=form.window)
    if rotation is None and norm is None:
        q, kv = heads.split((num_all - 2 * num_kv_heads, 2 * num_kv_heads), dim=1)
        return ops.attention(q, kv.unflatten(1, (2, num_kv_heads)).unsqueeze(3), batch, form)
    cos, sin = rotation or (heads.new_empty(num_tokens, 1, 0), heads.new_empty(num_tokens, 1, 0))
    pages = (empty or heads.new_empty)(num_tokens, 2, num_kv_heads, 1, head_dim, dtype=heads.dtype)
    q = ops.rotate_and_store(NewHeads(heads, cos, sin, pages, batch.slot_mapping, norm=norm))
    return ops.attention(q, pages, batch, form)
