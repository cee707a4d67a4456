"""Small random cases of the operations that have kernels: what the canary runs on kernels and on plain torch."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.ops.activations import Activation
from quire.ops.backend import AttentionForm, Backend, NewHeads
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.experts import ExpertCall, ExpertWeights
from quire.ops.linear import LowRankWeights
from quire.ops.quantized import QuantizedWeight
from quire.ops.routing import ExpertRouter, Routing
from quire.ops.sampling import RowParameters, TokenPlaces, tokens_in
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.canary_inputs import Case, Inputs
from quire.ops.triton.canary_states import chunks, recurrent

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 8, 2, 128, 16
_DECODE, _MIXED = [(1, 1), (1, 300), (1, 37)], [(40, 40), (1, 90), (7, 70)]


def backends() -> tuple[Backend[Any, Any, Any], Backend[Any, Any, Any]]:
    """The backend that is tested, and the one that is right."""
    return TritonBackend(), EagerBackend(PlainLinear())


def _rms_norm(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    x, weight = make.normal(5, 1024), make.normal(1024)
    heads, weights = make.normal(5, 10, _HEAD_DIM), make.normal(10, _HEAD_DIM)
    return [ops.rms_norm(x, weight, 1e-6), ops.rms_norm(heads, weights, 1e-6)]


def _add_rms_norm(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    return list(ops.add_rms_norm(make.normal(5, 4096), make.normal(5, 4096), make.normal(4096), 1e-6))


def _layer_norm(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    return [ops.layer_norm(make.normal(5, 768), make.normal(768), make.normal(768), 1e-5)]


def _linear(num_tokens: int, ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    weight, bias = make.normal(256, 1024, scale=0.05), make.normal(256)
    return [ops.linear(make.normal(num_tokens, 1024), ops.pack_linear(weight, bias))]


def _gated_linear(activation: Activation, ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    weight = make.normal(512, 1024, scale=0.05)
    return [ops.gated_linear(make.normal(3, 1024), ops.pack_gated_linear(weight), activation)]


def _quantized(num_tokens: int, ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    scales, offsets = make.normal(128, 4, scale=0.01).float(), make.normal(128, 4, scale=0.01).float()
    pairs, table = (
        make.place(make.ids(128 * 256, 256).reshape(128, 256), torch.uint8),
        make.place(range(16), torch.float32),
    )
    codes = make.normal(128, 512).float().to(torch.float8_e4m3fn)
    four_bits = QuantizedWeight(pairs, scales, table, offsets)
    x = make.normal(num_tokens, 512)
    return [ops.linear(x, ops.pack_linear(each)) for each in (four_bits, QuantizedWeight(codes, scales[:, :1]))]


def _low_rank(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    results, sizes, num_adapters, rank = [], (256, 64), 3, 32
    for num_tokens in (5, 140):
        a, b = make.normal(num_adapters, 2 * rank, 1024, scale=0.03), make.normal(num_adapters, rank, 320, scale=0.2)
        factors, shifts = make.normal(num_adapters, 320).float(), make.normal(num_adapters, 320).float()
        adapters, x = make.ids(num_tokens, num_adapters + 1) - 1, make.normal(num_tokens, 1024)
        for each in (LowRankWeights(a, b, sizes), LowRankWeights(a, b, sizes, None, factors, shifts)):
            results.append(ops.add_low_rank(x, make.normal(num_tokens, 320), each, adapters))
    return results


def _elementwise(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    return [
        ops.add(make.normal(5, 1024), make.normal(5, 1024)),
        ops.scale(make.normal(5, 1024), 3.0, 30.0),
        ops.activate(make.normal(5, 1024), "gelu_tanh"),
        ops.activate_and_mul(make.normal(5, 1024), "silu"),
        ops.join([make.normal(5, 64), make.normal(5, 128)]),
        ops.take_rows(make.normal(50, 1024), make.ids(7, 50), 2.0),
    ]


def _turns(ops: Backend[Any, Any, Any], make: Inputs, num_tokens: int) -> tuple[Tensor, Tensor]:
    frequencies = make.place(10000.0 ** (-np.arange(0, 1, 2 / _HEAD_DIM)), torch.float32)
    return ops.rotation(make.ids(num_tokens, 1000), frequencies, 1.0, make.dtype)


def _rotary(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    cos, sin = _turns(ops, make, 5)
    return [cos, sin, ops.rotary(make.normal(5, _HEADS, _HEAD_DIM), cos, sin)]


def _pages(ops: Backend[Any, Any, Any], make: Inputs, num_pages: int, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or make.dtype
    shape = ops.kv_cache_shape(num_pages, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.zeros(num_bytes, dtype=torch.uint8, device=make.device).view(dtype).view(shape)


def _rotate_and_store(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    cos, sin = _turns(ops, make, 5)
    heads = make.normal(5, _HEADS + 2 * _KV_HEADS, _HEAD_DIM)
    norm = make.normal(_HEADS + _KV_HEADS, _HEAD_DIM), 1e-6
    cache, slots = _pages(ops, make, 4), make.place([3, 17, 40, 16, 63], torch.int64)
    return [ops.rotate_and_store(NewHeads(heads, cos, sin, cache, slots, norm=norm)), *ops.read_kv(cache, slots)]


def _write_kv(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    cache, slots = _pages(ops, make, 4), make.place([3, 17, 40, 16, 63], torch.int64)
    ops.write_kv(make.normal(5, _KV_HEADS, _HEAD_DIM), make.normal(5, _KV_HEADS, _HEAD_DIM), cache, slots)
    return list(ops.read_kv(cache, slots))


class _Rows(NamedTuple):
    """A step over pages that have been written.

    Attributes:
        cache: keys and values of all tokens.
        batch: of `Backend.attention_batch`.
        slots: of the new tokens.
    """

    cache: Tensor
    batch: Any
    slots: Tensor


def _rows(
    rows: list[tuple[int, int]], ops: Backend[Any, Any, Any], make: Inputs, dtype: torch.dtype | None = None
) -> _Rows:
    """Each row has new tokens, and as many in all."""
    query_lens, seq_lens = (np.array(each, dtype=np.int64) for each in zip(*rows, strict=True))
    counts = -(-seq_lens // _BLOCK_SIZE)
    tables = np.zeros((len(rows), counts.max()), dtype=np.int64)
    for row, count in enumerate(counts):
        tables[row, :count] = 1 + counts[:row].sum() + np.arange(count)[::-1]
    positions = [np.arange(length) for length in seq_lens]
    places = [tables[row][each // _BLOCK_SIZE] * _BLOCK_SIZE + each % _BLOCK_SIZE for row, each in enumerate(positions)]
    cache = _pages(ops, make, 1 + int(counts.sum()), dtype)
    slots = make.place(np.concatenate(places), torch.int64)
    k, v = (make.normal(len(slots), _KV_HEADS, _HEAD_DIM) for _ in range(2))
    ops.write_kv(k, v, cache, slots)
    ends = [each[-count:] for each, count in zip(places, query_lens, strict=True)]
    new = make.place(np.concatenate(ends), torch.int64)
    return _Rows(cache, ops.attention_batch(query_lens, seq_lens, tables, new, block_size=_BLOCK_SIZE), new)


_FORMS = AttentionForm(_HEAD_DIM**-0.5), AttentionForm(_HEAD_DIM**-0.5, window=20, softcap=30.0)


def _attention(rows: list[tuple[int, int]], ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    step = _rows(rows, ops, make)
    q = make.normal(len(step.slots), _HEADS, _HEAD_DIM)
    return [ops.attention(q, step.cache, step.batch, form) for form in _FORMS]


def _rotate_and_attend(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    results: list[Tensor] = []
    for form in _FORMS:
        step = _rows(_DECODE, ops, make)
        heads = make.normal(len(_DECODE), _HEADS + 2 * _KV_HEADS, _HEAD_DIM)
        norm = make.normal(_HEADS + _KV_HEADS, _HEAD_DIM), 1e-6
        new = NewHeads(heads, *_turns(ops, make, len(_DECODE)), step.cache, step.slots, norm=norm)
        results += [ops.rotate_and_attend(new, step.batch, form)]
        results += ops.read_kv(step.cache, step.slots)
    return results


def _quantized_cache(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    results: list[Tensor] = []
    for rows in ([(1, 1), (1, 37)], [(9, 20), (1, 30)]):
        step = _rows(rows, ops, make, torch.float8_e4m3fn)
        q = make.normal(len(step.slots), _HEADS, _HEAD_DIM)
        results += [ops.attention(q, step.cache, step.batch, _FORMS[0]), *ops.read_kv(step.cache, step.slots)]
    return results


def _latent_attention(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    heads, rank, rotary_dim, lengths = 16, 512, 64, (1, 300, 37)
    counts = [-(-length // _BLOCK_SIZE) for length in lengths]
    tables = np.zeros((len(lengths), max(counts)), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = np.arange(count) + sum(counts[:row])
    cache = make.normal(sum(counts), _BLOCK_SIZE, rank + rotary_dim)
    slots = make.place([0] * len(lengths), torch.int64)
    batch = ops.attention_batch(
        np.ones(len(lengths), np.int64), np.array(lengths), tables, slots, block_size=_BLOCK_SIZE
    )
    q, q_rotated = make.normal(len(lengths), heads, rank), make.normal(len(lengths), heads, rotary_dim)
    scale = (rank + rotary_dim) ** -0.5
    return [
        ops.latent.latent_attention(q, q_rotated, cache, batch, scale=scale),
        *ops.latent.partial_latent_attention(q, q_rotated, cache, batch, scale=scale),
    ]


def _route(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    weight, x = make.normal(32, 256, scale=0.05), make.normal(5, 256)
    routings = Routing(4), Routing(4, "sigmoid", renormalize=True, num_groups=4, top_groups=2, group_best=2)
    return [each for routing in routings for each in ops.route(x, ExpertRouter(routing, weight))]


def _experts(num_tokens: int, ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    weights = [ExpertWeights(make.normal(256, 256, scale=0.06), make.normal(256, 128, scale=0.09)) for _ in range(8)]
    packed = ops.pack_experts(iter(weights), len(weights))
    ids = make.ids(2 * num_tokens, 4).reshape(num_tokens, 2) + make.place([0, 4], torch.int64)
    shares = make.place([[0.75, 0.25]] * num_tokens, torch.float32)
    return [ops.experts(packed, ExpertCall(make.normal(num_tokens, 256), ids, shares))]


def _sampling(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    logits = make.normal(3, 5000).float()
    starts, positions = np.array([1, 2, 3], dtype=np.uint64), np.array([4, 5, 6], dtype=np.int64)
    masked = logits.clone()
    bitmask = np.full((1, -(-5000 // 32)), 0x55555555, dtype=np.int32)
    ops.sampling.apply_bitmask(masked, np.array([1]), bitmask)
    kept = [
        ops.sampling.keep_min_p(logits.clone(), np.full(3, -2.0, np.float32)),
        ops.sampling.keep_top_k(logits.clone(), np.array([1, 50, 2000])),
        ops.sampling.keep_top_p(logits.clone(), np.array([0.1, 0.5, 0.9])),
    ]
    return [*ops.sampling.likeliest(logits), *ops.sampling.draw(logits, starts, positions), masked, *kept]


def _recorded_sampling(ops: Backend[Any, Any, Any], make: Inputs) -> list[Tensor]:
    size, count = 5000, 4
    logits, columns = make.normal(count, size), 600
    memory = make.ids(count * columns + 2, size).int()
    ring = make.place(np.zeros((2, 48)), torch.uint8)
    index = make.place([3, 0, 1, 2], torch.int64)
    positions = make.place([600, 20, 333, 7], torch.int64) - 1
    to = TokenPlaces(
        memory[: count * columns].view(count, columns), memory, index * columns + positions, ring,
        make.place([1], torch.int64),
    )  # fmt: skip
    rows = RowParameters(
        slots=index, positions=positions, num_unnamed=make.place([0, 5, 0, 0], torch.int32),
        num_prompt_tokens=make.place([300, 8, 333, 1], torch.int32), starts=make.ids(count, 2**62),
        is_greedy=make.place([0, 1, 0, 0], torch.int8), temperature=make.place([0.7, 1, 1.5, 1], torch.float32),
        log_min_p=make.place([-float("inf"), -float("inf"), -2, -float("inf")], torch.float32),
        top_k=make.place([50, size, size, size], torch.int64), top_p=make.place([0.9, 1, 1, 1], torch.float64),
        repetition=make.place([1.2, 1, 1, 1], torch.float32), frequency=make.place([0, 0.5, 0, 0], torch.float32),
        presence=make.place([0, 0, 0.5, 0], torch.float32),
    )  # fmt: skip
    results = []
    for each in (rows, None):
        ops.sampling.choose(logits, each, to)
        results += [memory[to.places], *(part.clone() for part in tokens_in(ring[1], count))]
    return results


def _cases() -> Iterator[Case]:
    yield Case("rms_norm", ("rms_norm",), _rms_norm)
    yield Case("add_rms_norm", ("add_rms_norm",), _add_rms_norm)
    yield Case("layer_norm", ("layer_norm",), _layer_norm)
    for num_tokens in (1, 20, 128):
        yield Case(f"linear of {num_tokens}", ("linear", "gated_linear"), partial(_linear, num_tokens))
    yield Case("gated_linear", ("gated_linear",), partial(_gated_linear, "silu"))
    for num_tokens in (3, 130):
        yield Case(f"quantized of {num_tokens}", ("quantized",), partial(_quantized, num_tokens))
    yield Case("adapters", ("add_low_rank",), _low_rank)
    elementwise = ("add", "scale", "activate", "activate_and_mul", "join", "take_rows")
    yield Case("elementwise", elementwise, _elementwise)
    yield Case("rotary", ("rotation", "rotary"), _rotary)
    yield Case("write_kv", ("write_kv",), _write_kv)
    yield Case("rotate_and_store", ("rotate_and_store",), _rotate_and_store)
    attention = ("attention", "partial_attention", "merge_attention")
    yield Case("decode attention", attention, partial(_attention, _DECODE))
    yield Case("rotation and decode attention", ("rotate_and_attend",), _rotate_and_attend)
    yield Case("prompt attention", attention, partial(_attention, _MIXED))
    yield Case("quantized cache", ("write_kv", "rotate_and_store", "rotate_and_attend", *attention), _quantized_cache)
    yield Case("latent attention", ("latent",), _latent_attention)
    yield Case("route", ("route",), _route)
    for num_tokens in (1, 40):
        yield Case(f"experts of {num_tokens}", ("experts",), partial(_experts, num_tokens))
    for num_tokens in (2, 7):
        yield Case(f"recurrent layers of {num_tokens}", ("recurrent",), partial(recurrent, num_tokens))
    yield Case("chunks of recurrent layers", ("recurrent",), chunks)
    yield Case("sampling", ("sampling",), _sampling)
    yield Case("recorded sampling", ("sampling",), _recorded_sampling)


CASES = tuple(_cases())
