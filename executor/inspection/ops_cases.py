"""The operations that `quire bench ops` times, each as a function without arguments, with the amount of its work."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.core.errors import ConfigError
from quire.core.wire.inspection import LayerShape, OpsQuestion
from quire.executor.inspection.weight_formats import FORMATS, activation_dtype
from quire.executor.layers.attention.layer_kv import LatentKV
from quire.executor.memory.kv_layout import zeros
from quire.ops.backend import AttentionForm, Backend
from quire.ops.cache_rows import row_size
from quire.ops.experts import ExpertCall, ExpertWeights
from quire.ops.latent import CacheRows

BEYOND_CACHES = 96 << 20
"""The bytes of weights that are used in turn, so that no cache contains those of the next round."""
_MOST_COPIES = 64
_BLOCK_SIZE = 16
_MOST_TOKENS = 65536
"""The bytes of all requests' contexts together."""
_TOKENS_AT_ONCE = 1024
"""The tokens that are written to a cache at once."""
_CACHE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
}


@dataclass
class Case:
    """One cell of the grid."""

    operation: str
    dtype: str
    rows: int
    run: Callable[[], object]
    """Runs a round, on other data than the previous round."""
    num_bytes: Callable[[], int]
    """The bytes that the last round had to read."""
    num_operations: int
    """The multiplications and additions of a round."""


def cases(ops: Backend, question: OpsQuestion) -> Iterator[Case]:
    """Yields all cells, each built when it is needed.

    Raises:
        ConfigError: an operation or a dtype has another name.
    """
    for field, asked, known in (("ops", question.operations, MAKERS), ("dtypes", question.dtypes, FORMATS)):
        if wrong := [name for name in asked if name not in known]:
            raise ConfigError(f"--{field} must be some of {', '.join(known)}; got {wrong[0]!r}.")
    for operation in question.operations:
        for dtype in question.dtypes:
            yield from MAKERS[operation](ops, question.shape, dtype, question.rows)


def _linear(ops: Backend, shape: LayerShape, dtype: str, rows: list[int]) -> Iterator[Case]:
    """The four linear layers of a decoder layer; that of gates and ups with its activation."""
    heads, kv_heads, hidden = shape.num_heads, shape.num_kv_heads, shape.hidden_size
    sizes = [
        ((heads + 2 * kv_heads) * shape.head_dim, hidden),
        (hidden, heads * shape.head_dim),
        (2 * shape.intermediate_size, hidden),
        (hidden, shape.intermediate_size),
    ]
    weights = [FORMATS[dtype](*size) for size in sizes]
    num_bytes = sum(weight.nbytes for weight in weights)
    pack = [ops.pack_linear, ops.pack_linear, ops.pack_gated_linear, ops.pack_linear]
    copies = [
        [each(weight) for each, weight in zip(pack, weights, strict=True)]
        for _ in range(min(_MOST_COPIES, -(-BEYOND_CACHES // num_bytes)))
    ]
    for count in rows:
        inputs = [torch.randn(count, size).to(activation_dtype(dtype)) for _, size in sizes]

        def run(inputs: list[torch.Tensor] = inputs) -> None:
            copies.append(copies.pop(0))
            qkv, out, gate_up, down = copies[0]
            ops.linear(inputs[0], qkv)
            ops.linear(inputs[1], out)
            ops.gated_linear(inputs[2], gate_up)
            ops.linear(inputs[3], down)

        num_operations = 2 * count * sum(out * size for out, size in sizes)
        yield Case("linear", dtype, count, run, lambda: num_bytes, num_operations)


def _attention(ops: Backend, shape: LayerShape, dtype: str, rows: list[int]) -> Iterator[Case]:
    """A decode step: each row is a request of `context` tokens, or fewer where many rows would need too much memory."""
    if dtype not in _CACHE_DTYPES:
        return
    for count in rows:
        context = max(1, min(shape.context, _MOST_TOKENS // count))
        yield _attend(ops, shape, "attention", dtype, count, np.full(count, 1), np.full(count, context))


def _prefill(ops: Backend, shape: LayerShape, dtype: str, rows: list[int]) -> Iterator[Case]:
    """The attention of a prompt; rows are its tokens."""
    if dtype not in _CACHE_DTYPES:
        return
    for count in rows:
        if count > 1:
            yield _attend(ops, shape, "prefill", dtype, count, np.array([count]), np.array([count]))


def _cache(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocates zeros as an engine's cache does: in huge pages, if the system has them."""
    return zeros(math.prod(shape) * dtype.itemsize, torch.device("cpu")).view(dtype).view(*shape)


def _clone(cache: torch.Tensor) -> torch.Tensor:
    return _cache(cache.shape, cache.dtype).copy_(cache)


def _attend(
    ops: Backend, shape: LayerShape, name: str, dtype: str, rows: int, query_lens: np.ndarray, seq_lens: np.ndarray
) -> Case:
    number, cache_dtype = activation_dtype(dtype), _CACHE_DTYPES[dtype]
    pages_each = -(-int(seq_lens[0]) // _BLOCK_SIZE)
    num_pages = pages_each * len(seq_lens)
    one = _cache(
        ops.kv_cache_shape(num_pages, _BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, cache_dtype), cache_dtype
    )
    for first in range(0, num_pages * _BLOCK_SIZE, _TOKENS_AT_ONCE):
        slots = torch.arange(first, min(first + _TOKENS_AT_ONCE, num_pages * _BLOCK_SIZE))
        keys, values = torch.randn(2, len(slots), shape.num_kv_heads, shape.head_dim).to(number)
        ops.write_kv(keys, values, one, slots)
    caches = [one] + [_clone(one) for _ in range(min(_MOST_COPIES, BEYOND_CACHES // one.nbytes))]
    tables = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(len(seq_lens), pages_each)
    q = torch.randn(rows, shape.num_heads, shape.head_dim).to(number)
    slots = torch.zeros(rows, dtype=torch.int64)
    batch = ops.attention_batch(
        query_lens.astype(np.int64), seq_lens.astype(np.int64), tables, slots, block_size=_BLOCK_SIZE
    )
    form = AttentionForm(shape.head_dim**-0.5)

    def run() -> None:
        caches.append(caches.pop(0))
        ops.attention(q, caches[0], batch, form)

    seen = int(sum(query * (length - (query - 1) / 2) for query, length in zip(query_lens, seq_lens, strict=True)))
    num_bytes = int(seq_lens.sum()) * 2 * shape.num_kv_heads * row_size(shape.head_dim, cache_dtype) * one.itemsize
    return Case(name, dtype, rows, run, lambda: num_bytes, 4 * seen * shape.num_heads * shape.head_dim)


def _latent(ops: Backend, shape: LayerShape, dtype: str, rows: list[int]) -> Iterator[Case]:
    """Latent attention of a decode step, with the layers into and out of the latent space; rows as in `_attention`."""
    if dtype not in _CACHE_DTYPES:
        return
    for count in rows:
        yield _attend_to_latents(ops, shape, dtype, count, max(1, min(shape.context, _MOST_TOKENS // count)))


def _attend_to_latents(ops: Backend, shape: LayerShape, dtype: str, rows: int, context: int) -> Case:
    number, heads, head_dim = activation_dtype(dtype), shape.num_heads, shape.head_dim
    rank, rotary_dim, pages_each = shape.latent_rank, shape.latent_rotary_dim, -(-context // _BLOCK_SIZE)
    pages = _random_pages(ops, LatentKV((rank, rotary_dim)), rows * pages_each, dtype)
    into = torch.randn(heads, head_dim, rank).to(number)
    num_bytes = rows * context * pages.shape[2] * pages.itemsize + 2 * into.nbytes
    copies = [
        (_clone(pages), into.clone(), into.transpose(1, 2).contiguous())
        for _ in range(1 + min(_MOST_COPIES, BEYOND_CACHES // num_bytes))
    ]
    tables = np.random.default_rng(0).permutation(len(pages)).astype(np.int32).reshape(rows, pages_each)
    q, q_rotated = (torch.randn(rows, heads, size).to(number) for size in (head_dim, rotary_dim))
    slots = torch.zeros(rows, dtype=torch.int64)
    lengths = np.full(rows, context)
    batch = ops.attention_batch(np.ones(rows, np.int64), lengths, tables, slots, block_size=_BLOCK_SIZE)

    def run() -> None:
        copies.append(copies.pop(0))
        cache, into, out_of = copies[0]
        latent = ops.latent.head_linear(q, into)
        found = ops.latent.latent_attention(latent, q_rotated, cache, batch, scale=head_dim**-0.5)
        ops.latent.head_linear(found, out_of)

    num_operations = 2 * rows * heads * (2 * head_dim * rank + context * (2 * rank + rotary_dim))
    return Case("latent", dtype, rows, run, lambda: num_bytes, num_operations)


def _random_pages(ops: Backend, kv: LatentKV, num_pages: int, dtype: str) -> torch.Tensor:
    """Builds a cache of `kv` with random values in all of its slots."""
    pages = _cache(kv.cache_shape(ops, num_pages, _BLOCK_SIZE, _CACHE_DTYPES[dtype]), _CACHE_DTYPES[dtype])
    for slots in torch.arange(num_pages * _BLOCK_SIZE).split(_TOKENS_AT_ONCE):
        kv.store(ops, torch.randn(len(slots), kv.size).to(activation_dtype(dtype)), pages, slots)
    return pages


def _compressed(ops: Backend, shape: LayerShape, dtype: str, rows: list[int]) -> Iterator[Case]:
    """Yields compressed attention of a decode step: an indexer selects rows, and a token sees these and its window."""
    if dtype not in _CACHE_DTYPES:
        return
    for count in rows:
        yield _attend_to_rows(ops, shape, dtype, count, max(shape.rate, min(shape.context, _MOST_TOKENS // count)))


def _attend_to_rows(ops: Backend, shape: LayerShape, dtype: str, rows: int, context: int) -> Case:
    number, heads, size = activation_dtype(dtype), shape.num_heads, shape.latent_rank
    window, num_rows = min(shape.window, context), context // shape.rate
    chosen = min(num_rows, shape.index_top_k)
    scored = num_rows if num_rows > chosen else 0

    def pages(count: int, size: int) -> CacheRows:
        """`count` rows of each request, in pages in any order."""
        pages_each = -(-count // _BLOCK_SIZE)
        cache = _random_pages(ops, LatentKV((size,)), rows * pages_each, dtype)
        order = torch.randperm(len(cache), dtype=torch.int32).view(rows, pages_each, 1)
        slots = (order * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE, dtype=torch.int32)).flatten(1)[:, :count]
        return CacheRows(cache, slots.contiguous(), torch.full((rows,), count))

    latest, keys, compressed = pages(window, size), pages(num_rows, shape.index_head_dim), pages(num_rows, size)
    q, index_q = torch.randn(rows, heads, size), torch.randn(rows, shape.index_heads, shape.index_head_dim)
    q, index_q, weights = q.to(number), index_q.to(number), torch.randn(rows, shape.index_heads).to(number)
    sinks = torch.randn(heads)

    key_bytes, row_bytes = (each.cache.shape[2] * each.cache.itemsize for each in (keys, compressed))
    num_bytes = rows * (scored * key_bytes + (window + chosen) * row_bytes)
    copies = [
        [_clone(each.cache) for each in (latest, keys, compressed)]
        for _ in range(1 + min(_MOST_COPIES, BEYOND_CACHES // num_bytes))
    ]

    def run() -> None:
        copies.append(copies.pop(0))
        latents, index_keys, row_latents = copies[0]
        found = ops.latent.select_rows(
            index_q, weights, keys._replace(cache=index_keys), top_k=shape.index_top_k, scale=size**-0.5
        )
        seen = [latest._replace(cache=latents), found._replace(cache=row_latents)]
        ops.latent.attend_rows(q, seen, sinks, scale=size**-0.5)

    index_operations = scored * shape.index_heads * shape.index_head_dim
    num_operations = 2 * rows * (index_operations + 2 * heads * size * (window + chosen))
    return Case("compressed", dtype, rows, run, lambda: num_bytes, num_operations)


def _experts(ops: Backend, shape: LayerShape, dtype: str, rows: list[int]) -> Iterator[Case]:
    """Yields layers of experts, which rows select at random."""
    hidden, size, num_experts, top_k = shape.expert_hidden_size, shape.expert_size, shape.num_experts, shape.top_k
    expert = ExpertWeights(FORMATS[dtype](2 * size, hidden), FORMATS[dtype](hidden, size))
    bytes_each = expert.gate_up.nbytes + expert.down.nbytes
    packed = ops.pack_experts((expert for _ in range(num_experts)), num_experts)
    for count in rows:
        x, weights = torch.randn(count, hidden).to(activation_dtype(dtype)), torch.full((count, top_k), 1 / top_k)
        chosen = [torch.empty(0)]

        def run(x: torch.Tensor = x, weights: torch.Tensor = weights, chosen: list[torch.Tensor] = chosen) -> None:
            chosen[0] = torch.rand(len(x), num_experts).argsort(dim=1)[:, :top_k].contiguous()
            ops.experts(packed, ExpertCall(x, chosen[0], weights))

        def num_bytes(chosen: list[torch.Tensor] = chosen) -> int:
            return len(chosen[0].unique()) * bytes_each

        yield Case("experts", dtype, count, run, num_bytes, 2 * count * top_k * 3 * size * hidden)


MAKERS: dict[str, Callable[[Backend, LayerShape, str, list[int]], Iterator[Case]]] = {
    "linear": _linear,
    "attention": _attention,
    "prefill": _prefill,
    "latent": _latent,
    "compressed": _compressed,
    "experts": _experts,
}
