"""The operations of multi-head latent attention in plain torch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.ops.cache_rows import decode_parts, decoded_bytes, encode, in_octets, largest_stored, split_rows
from quire.ops.eager import attention_plan
from quire.ops.eager.attention_plan import AttentionPlan, Group, VisibleRange
from quire.ops.eager.selection import attend_rows, attend_selected, best_rows, select_tokens
from quire.ops.latent import CacheRows, LatentOperations, NewLatents, Selection


class EagerLatent(LatentOperations[AttentionPlan]):
    def __init__(self, rms_norm: Callable[..., Tensor], rotary: Callable[..., Tensor]) -> None:
        """`rms_norm` and `rotary` are the backend's."""
        self._rms_norm = rms_norm
        self._rotary = rotary

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def rotate_and_store_latent(self, new: NewLatents) -> Tensor:
        q, latent, norm, cos, sin, cache, slot_mapping, is_interleaved = new
        rank = len(norm[0])
        k = latent[:, rank:].unsqueeze(1)
        if is_interleaved:
            q, k = (torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) for x in (q, k))
        parts = self._rms_norm(latent[:, :rank], *norm), self._rotary(k, cos, sin).squeeze(1)
        for x, rows in zip(parts, split_rows(cache, (rank, latent.shape[1] - rank)), strict=True):
            self.store_rows(x, rows, slot_mapping)
        return self._rotary(q, cos, sin)

    def store_rows(self, x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        largest = largest_stored(cache.dtype)
        pages, offsets = slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]
        rows = encode(x.nan_to_num(0.0, largest, -largest), cache.dtype)
        in_octets(cache)[pages, offsets] = in_octets(rows)

    def select_tokens(
        self, q: Tensor, weights: Tensor, cache: Tensor, batch: AttentionPlan, *, top_k: int, scale: float
    ) -> Selection:
        return select_tokens(q, weights, cache, batch, top_k, scale)

    def best_rows(self, q: Tensor, weights: Tensor, rows: CacheRows, *, top_k: int, scale: float) -> Tensor:
        return best_rows(q, weights, rows, top_k, scale)

    def attend_rows(self, q: Tensor, rows: Sequence[CacheRows], sinks: Tensor, *, scale: float) -> Tensor:
        return attend_rows(q, rows, sinks, scale)

    def latent_attention(
        self,
        q: Tensor,
        q_rotated: Tensor,
        cache: Tensor,
        batch: AttentionPlan,
        *,
        scale: float,
        selection: Selection | None = None,
    ) -> Tensor:
        if selection is not None:
            return attend_selected(q, q_rotated, cache, selection, scale)
        return _attend(q, q_rotated, cache, batch, scale)

    def partial_latent_attention(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, batch: AttentionPlan, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return _attend(q, q_rotated, cache, batch, scale, lse), lse


def _attend(
    q: Tensor, q_rotated: Tensor, cache: Tensor, batch: AttentionPlan, scale: float, lse: Tensor | None = None
) -> Tensor:
    """Computes the step's groups one after another. `lse` [num_tokens, heads] float32 is filled, if it is given."""
    queries = torch.cat((q, q_rotated), dim=-1)
    out = torch.empty_like(q)
    page_bytes = decoded_bytes(cache.shape[1] * queries.shape[2], cache.dtype, q.dtype)
    for group in batch.groups(VisibleRange(None, None), q.shape[1], page_bytes):
        own = None if lse is None else lse[group.tokens].clone()
        result = _attend_group(queries[group.tokens], cache, group, scale, q.shape[-1], own)
        for total, part in ((out, result), (lse, own)):
            if total is None or part is None:
                continue
            if group.valid is not None:
                total[group.targets] = part[group.valid]
            else:
                total[group.tokens] = part
    return out


def _attend_group(q: Tensor, cache: Tensor, group: Group, scale: float, rank: int, lse: Tensor | None) -> Tensor:
    """`q` [R * Q, heads, rank + rotary_dim] of one group → [R * Q, heads, rank]. `lse` [R * Q, heads] is filled."""
    num_heads = q.shape[1]
    rows = in_octets(cache).index_select(0, group.pages).view(group.num_rows, group.key_len, -1)
    keys = group.clear_unseen(decode_parts(rows.view(cache.dtype), (rank, q.shape[2] - rank), q.dtype))
    queries = q.view(group.num_rows, group.query_len, num_heads, -1)
    sums = None if lse is None else lse.view(group.num_rows, group.query_len, num_heads)
    step = max(1, attention_plan.max_scores(q.device, num_heads) // (group.num_rows * group.key_len))
    parts = []
    for begin in range(0, group.query_len, step):
        scores = _scores(queries[:, begin : begin + step], keys, group, begin, scale)
        if sums is not None:
            sums[:, begin : begin + step] = scores.logsumexp(dim=-1)
        weights = torch.softmax(scores, dim=-1).to(q.dtype)
        parts.append(torch.bmm(weights.flatten(1, 2), keys[..., :rank]).view(*weights.shape[:3], rank))
    return torch.cat(parts, dim=1).view(-1, num_heads, rank)


def _scores(q: Tensor, keys: Tensor, group: Group, begin: int, scale: float) -> Tensor:
    """Computes scores of `q` [R, queries, heads, rank + rotary_dim], the queries from `begin` on: [R, queries, heads,
    keys].
    """
    num_rows, num_queries, num_heads, _ = q.shape
    scores = torch.bmm(q.reshape(num_rows, num_queries * num_heads, -1), keys.transpose(1, 2))
    if q.dtype == torch.float16:
        scores.clamp_(-65504, 65504)  # the score of a masked key may overflow, and inf - inf is NaN
    scores = scores.view(num_rows, num_queries, num_heads, -1).float() * scale
    bias = group.bias(begin, begin + num_queries)
    if bias is not None:
        scores += bias.transpose(1, 2)
    return scores
