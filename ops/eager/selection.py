"""Attention to selected tokens (arXiv:2512.02556, section 2.1) in plain torch."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quire.ops.cache_rows import decode, decode_parts, decoded_bytes, gather, in_octets
from quire.ops.eager import attention_plan
from quire.ops.eager.attention_plan import AttentionPlan, Group, VisibleRange
from quire.ops.latent import CacheRows, Selection


def select_tokens(
    q: Tensor, weights: Tensor, cache: Tensor, batch: AttentionPlan, top_k: int, scale: float
) -> Selection:
    num_tokens, num_heads, size = q.shape
    page_bytes = decoded_bytes(cache.shape[1] * size, cache.dtype, torch.float32)
    slots = torch.empty(num_tokens, top_k, dtype=torch.int32, device=q.device)
    counts = torch.empty(num_tokens, dtype=torch.int64, device=q.device)
    for group in batch.groups(VisibleRange(None, None), num_heads, page_bytes):
        tokens: slice | Tensor = group.tokens
        rows = in_octets(cache).index_select(0, group.pages).view(group.num_rows, group.key_len, -1)
        keys = group.clear_unseen(decode(rows.view(cache.dtype), torch.float32))
        queries, factors = (x[tokens].view(group.num_rows, group.query_len, *x.shape[1:]).float() for x in (q, weights))
        step = max(1, attention_plan.max_scores(q.device, num_heads) // (group.num_rows * group.key_len))
        parts = [
            _select(queries[:, i : i + step], factors[:, i : i + step], keys, group, i, top_k, scale)
            for i in range(0, group.query_len, step)
        ]
        chosen = torch.cat(parts, dim=1).view(-1, top_k).int()
        seen = (group.query_positions + 1).clamp_max(top_k).view(-1)
        if group.valid is not None:
            assert group.targets is not None
            tokens, chosen, seen = group.targets, chosen[group.valid], seen[group.valid]
        slots[tokens], counts[tokens] = chosen, seen
    return Selection(slots, counts)


def _select(q: Tensor, weights: Tensor, keys: Tensor, group: Group, begin: int, top_k: int, scale: float) -> Tensor:
    """The slots [R, queries, top_k] for `q` [R, queries, heads, size]: the group's queries from `begin` on."""
    num_rows, num_queries, num_heads, _ = q.shape
    scores = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).mul_(scale).relu_()
    scores = scores.view(num_rows, num_queries, num_heads, -1).mul_(weights.unsqueeze(-1)).sum(dim=2)
    bias = group.bias(begin, begin + num_queries)
    if bias is not None:
        scores += bias.squeeze(1)
    scores.masked_fill_(scores.isnan(), float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    seen = (group.query_positions[:, begin : begin + num_queries] + 1).unsqueeze(-1)
    hidden = torch.arange(best.shape[-1], device=q.device) >= seen
    best = best.masked_fill(hidden, group.key_len).sort(dim=-1).values
    best = torch.where(
        best < group.key_len, best, best[..., :1]
    )  # indices past the count are those of an existing page
    pages = group.pages.view(num_rows, 1, -1).expand(-1, num_queries, -1)
    block_size = group.key_len // pages.shape[-1]
    slots = pages.gather(2, best // block_size) * block_size + best % block_size
    return torch.cat((slots, slots[..., :1].expand(-1, -1, top_k - slots.shape[-1])), dim=-1)


def attend_selected(q: Tensor, q_rotated: Tensor, cache: Tensor, selection: Selection, scale: float) -> Tensor:
    """Runs `LatentOperations.latent_attention` with a selection."""
    queries, (num_tokens, top_k) = torch.cat((q, q_rotated), dim=-1), selection.slots.shape
    token_bytes = decoded_bytes(top_k * queries.shape[2], cache.dtype, q.dtype)
    step = max(1, attention_plan.workspace_bytes(q.device) // token_bytes)
    hidden = torch.arange(top_k, device=q.device) >= selection.counts.unsqueeze(1)
    out = torch.empty_like(q)
    for begin in range(0, num_tokens, step):
        part = slice(begin, begin + step)
        rows = gather(cache, _seen_slots(selection, hidden, part))
        keys = decode_parts(rows, (q.shape[2], q_rotated.shape[2]), q.dtype)
        scores = torch.bmm(queries[part], keys.transpose(1, 2))
        if q.dtype == torch.float16:
            scores.clamp_(-65504, 65504)
        scores = (scores.float() * scale).masked_fill_(hidden[part].unsqueeze(1), float("-inf"))
        out[part] = torch.bmm(torch.softmax(scores, dim=-1).to(q.dtype), keys[..., : q.shape[-1]])
    return out


def attend_tokens(
    q: Tensor,
    kv_cache: Tensor,
    read_kv: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    selection: Selection,
    scale: float,
) -> Tensor:
    """Runs `Backend.selected_attention`; `read_kv` is `Backend.read_kv`."""
    (num_tokens, _, head_dim), num_kv_heads, most = q.shape, kv_cache.shape[2], selection.slots.shape[1]
    queries = q.view(num_tokens, num_kv_heads, -1, head_dim)
    token_bytes = decoded_bytes(most * num_kv_heads * head_dim, kv_cache.dtype, q.dtype)
    step = max(1, attention_plan.workspace_bytes(q.device) // token_bytes)
    hidden = torch.arange(most, device=q.device) >= selection.counts.unsqueeze(1)
    out = torch.empty_like(queries)
    for begin in range(0, num_tokens, step):
        part = slice(begin, begin + step)
        slots = _seen_slots(selection, hidden, part)
        keys, values = (
            x.to(q.dtype).unflatten(0, slots.shape).transpose(1, 2) for x in read_kv(kv_cache, slots.flatten())
        )
        scores = torch.matmul(queries[part], keys.transpose(2, 3))  # [tokens, num_kv_heads, heads a KV head, most]
        if q.dtype == torch.float16:
            scores.clamp_(-65504, 65504)
        scores = (scores.float() * scale).masked_fill_(hidden[part, None, None], float("-inf"))
        out[part] = torch.matmul(torch.softmax(scores, dim=-1).to(q.dtype), values)
    return out.view(q.shape)


def _seen_slots(selection: Selection, hidden: Tensor, part: slice) -> Tensor:
    """Returns the slots of some tokens, int64. The first slot replaces hidden ones, which may contain any bytes."""
    slots = selection.slots[part].long()
    return torch.where(hidden[part], slots[:, :1], slots)


def best_rows(q: Tensor, weights: Tensor, rows: CacheRows, top_k: int, scale: float) -> Tensor:
    found = rows.slots.new_empty(len(q), min(top_k, rows.slots.shape[1]))
    for part in _parts([rows], q.shape[2], torch.float32):
        keys, hidden = _gathered(rows, part, torch.float32)
        scores = torch.bmm(q[part].float(), keys.transpose(1, 2)).mul_(scale).relu_()
        scores = scores.mul_(weights[part].float().unsqueeze(-1)).sum(dim=1).masked_fill_(hidden, float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        best = best.masked_fill(hidden.gather(1, best), hidden.shape[1]).sort(dim=-1).values
        found[part] = best.clamp_max(hidden.shape[1] - 1)
    return found


def attend_rows(q: Tensor, rows: Sequence[CacheRows], sinks: Tensor, scale: float) -> Tensor:
    out = torch.empty_like(q)
    for part in _parts(rows, q.shape[2], q.dtype):
        gathered = [_gathered(each, part, q.dtype) for each in rows]
        keys, hidden = (torch.cat(each, dim=1) for each in zip(*gathered, strict=True))
        scores = torch.bmm(q[part], keys.transpose(1, 2))
        if q.dtype == torch.float16:
            scores.clamp_(-65504, 65504)
        scores = (scores.float() * scale).masked_fill_(hidden.unsqueeze(1), float("-inf"))
        scores = torch.cat((scores, sinks.view(1, -1, 1).expand(len(scores), -1, 1)), dim=-1)
        out[part] = torch.bmm(torch.softmax(scores, dim=-1)[..., :-1].to(q.dtype), keys)
    return out


def _parts(rows: Sequence[CacheRows], size: int, dtype: torch.dtype) -> Iterator[slice]:
    """Yields slices of tokens whose rows, of `size` values, are gathered at once and read as `dtype`."""
    token_bytes = sum(decoded_bytes(each.slots.shape[1] * size, each.cache.dtype, dtype) for each in rows)
    step = max(1, attention_plan.workspace_bytes(rows[0].cache.device) // max(token_bytes, 1))
    for begin in range(0, len(rows[0].slots), step):
        yield slice(begin, begin + step)


def _gathered(rows: CacheRows, part: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns (the rows of some tokens [tokens, most, size], zeros if hidden; True for hidden ones [tokens, most])."""
    slots = rows.slots[part]
    hidden = torch.arange(slots.shape[1], device=slots.device) >= rows.counts[part].unsqueeze(1)
    keys = decode(gather(rows.cache, slots), dtype)
    return keys.masked_fill_(hidden.unsqueeze(-1), 0), hidden
