"""Attention over pages in plain torch: gather a group's pages, then two batched matrix products.

A layer's cache is [num_pages, 2, num_kv_heads, block_size, row_size], as `quire.ops.cache_rows` and
`quire.ops.cache_pages` say: a page's keys and values are one contiguous piece. Pages are gathered with the heads first,
so that [num_kv_heads * rows, keys, head_dim] is a batch of plain matrices. On CPUs without matrix units that is several
times faster than torch's fused attention, at all lengths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.backend import AttentionForm, PairBias
from quire.ops.cache_pages import ScaledRows
from quire.ops.cache_rows import decode, decoded_bytes, in_octets
from quire.ops.eager import attention_plan
from quire.ops.eager.attention_plan import AttentionPlan, Group, VisibleRange


def attend_partly(
    q: Tensor, kv_cache: Tensor, batch: AttentionPlan, form: AttentionForm, pages: ScaledRows
) -> tuple[Tensor, Tensor]:
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return attend(q, kv_cache, batch, form, lse, pages=pages), lse


def attend(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionPlan,
    form: AttentionForm,
    lse: Tensor | None = None,
    *,
    pages: ScaledRows,
) -> Tensor:
    """Runs `Backend.attention`, one of the step's groups after another.

    `lse` [num_tokens, num_heads] float32 is filled with the logarithms of the softmaxes' denominators.
    """
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    page_bytes = decoded_bytes(num_kv_heads * block_size * q.shape[2], kv_cache.dtype, q.dtype)
    groups = batch.groups(VisibleRange(form.window, form.chunk, form.chunks, form.span_window), q.shape[1], page_bytes)
    if len(groups) == 1 and isinstance(groups[0].tokens, slice):
        return _attend_group(q, kv_cache, groups[0], form, lse, pages)
    out = torch.empty_like(q)
    for group in groups:
        own = None if lse is None else lse[group.tokens].clone()
        result = _attend_group(q[group.tokens], kv_cache, group, form, own, pages)
        for total, part in ((out, result), (lse, own)):
            if total is None or part is None:
                continue
            if group.valid is not None:
                total[group.targets] = part[group.valid]
            else:
                total[group.tokens] = part
    return out


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    outs, sums = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    shares = sums.softmax(dim=0).masked_fill_(sums == -torch.inf, 0).unsqueeze(-1)
    return (outs.float() * shares).masked_fill_(sums.unsqueeze(-1) == -torch.inf, 0).sum(dim=0).to(outs.dtype)


def _attend_group(
    q: Tensor, kv_cache: Tensor, group: Group, form: AttentionForm, lse: Tensor | None, pages: ScaledRows
) -> Tensor:
    """`q` [R * Q, heads, head_dim] of one group → the same shape. `lse` [R * Q, heads] is as in `attend`."""
    _, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[2]
    keys, values = (decode(rows, q.dtype) for rows in _gather(kv_cache, group, pages).unbind())
    # Query heads that share a KV head lie side by side.
    split = q.view(group.num_rows, group.query_len, num_kv_heads, num_heads // num_kv_heads, head_dim)
    queries = split.permute(2, 0, 3, 1, 4)  # [num_kv_heads, R, heads a KV head, Q, head_dim]
    step = max(1, attention_plan.max_scores(q.device, num_heads) // (group.num_rows * group.key_len))
    sums = None
    if lse is not None:
        sums = lse.view(group.num_rows, group.query_len, num_kv_heads, -1).permute(2, 0, 3, 1)
    parts = [
        _products(
            queries[:, :, :, begin : begin + step],
            keys,
            values,
            group,
            begin,
            form,
            None if sums is None else sums[..., begin : begin + step],
        )
        for begin in range(0, group.query_len, step)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
    return out.permute(1, 3, 0, 2, 4).contiguous().view(q.shape)


def _gather(kv_cache: Tensor, group: Group, pages: ScaledRows) -> Tensor:
    """The keys and values of the group's pages as [2, num_kv_heads * R, L, the size of a row]; unseen: zeros."""
    num_kv_heads = kv_cache.shape[2]
    memory = in_octets(kv_cache)
    if kv_cache.is_contiguous():
        # Selected along the first dimension, because along a later one torch copies element by element.
        rows = memory.flatten(0, 2).index_select(0, group.heads_of_pages(num_kv_heads))
    else:  # pages that lie apart
        rows = memory.index_select(0, group.pages).permute(1, 2, 0, 3, 4).contiguous()
    rows = pages.rows(rows).view(2, num_kv_heads * group.num_rows, group.key_len, -1)
    rows = group.clear_unseen(rows)
    return rows.view(kv_cache.dtype)


def _products(
    q: Tensor, k: Tensor, v: Tensor, group: Group, begin: int, form: AttentionForm, lse: Tensor | None
) -> Tensor:
    """Attention of `q` [num_kv_heads, R, heads a KV head, queries, head_dim]: the group's queries from `begin` on.

    `lse` [num_kv_heads, R, heads a KV head, queries] is as in `attend`.
    """
    shape = q.shape
    scores = torch.bmm(q.reshape(len(k), -1, shape[-1]), k.transpose(1, 2))
    if q.dtype == torch.float16:
        scores.clamp_(-65504, 65504)  # the score of a masked key may overflow, and inf - inf is NaN
    scores = scores.view(*shape[:-1], -1)
    bias, scale = group.bias(begin, begin + shape[3]), form.scale
    if form.softcap is not None:
        scores, scale = scores.float().mul_(scale / form.softcap).tanh_(), form.softcap
    scores = scores.float().mul_(scale) if bias is None else torch.add(bias, scores, alpha=scale)
    if form.slopes is not None:
        scores += _by_head(form.slopes, shape) * group.distances(begin, begin + shape[3])
    if form.distance_bias is not None:
        scores += _by_distance(form.distance_bias, group.distances(begin, begin + shape[3]), shape)
    if form.pair_bias is not None:
        scores += _by_pair(form.pair_bias, group, begin, shape)
    if lse is not None:
        lse.copy_(scores.logsumexp(dim=-1))
    # Each step frees the result of the one before: scores are the largest part of attention's memory.
    if form.sinks is not None:  # one more score, which enlarges the softmax's denominator
        sink = _by_head(form.sinks, scores.shape).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    scores = torch.softmax(scores, dim=-1)
    if form.sinks is not None:
        scores = scores[..., :-1].contiguous()
    weights = scores.to(q.dtype)
    if lse is not None or form.chunks != "own":
        # For a query that sees no key. Matrix units read past a row's end, where this would be another query's NaN * 0.
        weights.nan_to_num_(0.0)
    return torch.bmm(weights.view(len(k), -1, k.shape[1]), v).view(shape)


def _by_distance(values: Tensor, distances: Tensor, shape: torch.Size) -> Tensor:
    """[num_heads, 2 * reach + 1] and [R, 1, queries, keys] → [num_kv_heads, R, heads a KV head, queries, keys]."""
    reach = values.shape[1] // 2
    index = distances.squeeze(1).clamp(-reach, reach).long() + reach
    return values[:, index].unflatten(0, (shape[0], shape[2])).transpose(1, 2)


def _by_pair(bias: PairBias, group: Group, begin: int, shape: torch.Size) -> Tensor:
    """`PairBias` of the group's queries from `begin` on → [num_kv_heads, R, heads a KV head, queries, keys]."""
    end = begin + shape[3]
    reach = len(bias.query_buckets) // 2
    index = group.distances(begin, end).squeeze(1).clamp(-reach, reach).long() + reach  # [R, queries, keys]
    queries = group.query_tokens.view(group.num_rows, -1)[:, begin:end]
    total = _pick(bias.of_queries[queries], bias.query_buckets[index]).float()  # [R, heads, queries, keys]
    if bias.of_keys is not None and bias.key_buckets is not None:
        keys = group.pages.view(group.num_rows, -1)  # of sequences without a cache, pages are tokens
        total = total + _pick(bias.of_keys[keys], bias.key_buckets[index.transpose(1, 2)]).transpose(2, 3).float()
    return total.unflatten(1, (shape[0], shape[2])).transpose(0, 1)


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """`rows` [R, N, heads, buckets] at `index` [R, N, M] → [R, heads, N, M]."""
    num_heads = rows.shape[2]
    return rows.transpose(1, 2).gather(3, index.unsqueeze(1).expand(-1, num_heads, -1, -1))


def _by_head(values: Tensor, shape: torch.Size) -> Tensor:
    """[num_heads] → [num_kv_heads, 1, heads a KV head, 1, 1], for scores of `shape`."""
    return values.view(shape[0], 1, shape[2], 1, 1)
