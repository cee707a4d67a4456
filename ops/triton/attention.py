"""Launches of the attention kernels: which kernel, which tiles, and the memory beside queries and pages."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from quire.ops.backend import AttentionForm, NewHeads
from quire.ops.cache_rows import in_octets, row_size
from quire.ops.triton import kv_rows
from quire.ops.triton.attention_scores import LOG2_E, NO_WINDOW
from quire.ops.triton.decode_attention import decode_attention, rotate_and_attend
from quire.ops.triton.decode_units import MAX_PART_BYTES, num_splits
from quire.ops.triton.kv_rows import QUANTIZED_FORMS
from quire.ops.triton.launch import Kernel
from quire.ops.triton.prompt_attention import num_blocks, prompt_attention
from quire.ops.triton.rotate_store import aligned
from quire.ops.triton.rows import PagedRows
from quire.ops.triton.tiles import FLOATS, USUAL
from quire.ops.triton.variants import Variant

MAX_TILE = 128 * 64
"""Query heads of a KV head, times numbers of a head: more would not fit a program's registers."""

MAX_PROMPT_HEAD_DIM = 256
"""Values of a head that a program has in prompts, and numbers of one in float32: registers hold no more."""

MAX_DECODE_ROWS = 4096
MAX_BLOCKS = 65_535
"""The most blocks of queries: programs along the second axis of a grid."""
PROGRAMS_PER_PROCESSOR = 4
"""Decode programs for each multiprocessor. Two are resident at 128 numbers a head, and the others follow: with two in
all, steps of 256 short sequences took 8 % longer on an H200."""

INTERPRETER_PROGRAMS = 3
ROW_BUCKETS = (512, MAX_DECODE_ROWS)
"""Rows whose lengths a program reads; 512 are four for each of its threads, and few are not read faster."""


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles: rows of queries, keys; and its warps and stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tiles(group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tiles:
    """Chooses the tiles of decode attention, from the model's shape alone.

    16 rows, the least of a matrix unit, hold the query heads of one KV head; more heads take a power of two. 64 keys
    are 16 kB of 16-bit numbers at 128 a head. Five stages, of which the lookup in the block table takes some, keep two
    tiles of keys and values under way: 72 kB a program, and two programs fit a multiprocessor by their registers.
    """
    block_m = max(16, triton.next_power_of_2(group))
    if head_dim > MAX_PROMPT_HEAD_DIM:  # 32 keys and values of 512 numbers are 64 kB, of which two are under way
        return Tiles(block_m, 32, 8, 3)
    # Keys of half as many rows where they are long, so that tiles of keys and values stay as large.
    block_n = 32 if head_dim * dtype.itemsize > 256 else 64
    # More warps where a thread would hold too much: rows of many heads, and the places of rows that are read by four
    # bytes, because scales lie between them. At 64 a head, where the compiler aims at three programs, four warps spill.
    is_large = block_m > 16 or cache_dtype in kv_rows.KINDS or head_dim <= 64
    return Tiles(block_m, block_n, 8 if is_large else 4, 3 if block_m > 32 else 5)


def prompt_tiles(num_lanes: int, group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Tiles:
    """Chooses the tiles for rows of at most `num_lanes` pairs of a token and a query head.

    128 rows use each tile of keys most, and two groups of four warps take 64 each, as a wide matrix unit wants. Few
    tokens, as of drafts, fill 64.
    """
    if dtype.itemsize == 4:  # products without matrix units hold all operands in registers; larger heads would not fit
        return Tiles(max(32, triton.next_power_of_2(group)), 32, 8, 2)
    if head_dim > MAX_PROMPT_HEAD_DIM:  # 64 rows of queries are 64 kB, and so are two tiles of keys
        return Tiles(64, 32, 8, 2)
    if head_dim > 128 or cache_dtype in kv_rows.KINDS:  # 64 rows of four warps would not fit, nor would 64 keys
        return Tiles(128, 32, 8, 3)
    return Tiles(64, 64, 4, 3) if max(num_lanes, group) <= 64 else Tiles(128, 64, 8, 3)


def covers(q: Tensor, kv_cache: Tensor, rows: PagedRows, form: AttentionForm) -> bool:
    """Returns True if `attend` computes this; what it does not is left to plain torch."""
    group, block_d = q.shape[1] // kv_cache.shape[2], triton.next_power_of_2(q.shape[2])
    return (
        has_tiles(q, kv_cache)
        and len(rows.seq_lens) <= MAX_DECODE_ROWS
        and len(q) + len(rows.seq_lens) <= MAX_BLOCKS
        and (rows.max_query_len == 1 or has_prompt_tiles(q.shape[2], kv_cache.dtype))
        and (q.dtype != torch.float32 or rows.max_query_len == 1 or (group <= 32 and block_d <= 64))
    )


def covers_rotation(heads: Tensor, kv_cache: Tensor, rows: PagedRows, form: AttentionForm) -> bool:
    """Returns True if `Attention.rotate_and_attend` takes the heads [num_tokens, heads and KV heads, head_dim].

    In a prefix, a row's last split may be without its new key. Of rows that are not apart, one may store a key after
    another has read it.
    """
    q = heads[:, : heads.shape[1] - 2 * kv_cache.shape[2]]
    return (
        rows.max_query_len == 1
        and rows.prefix_spans is None
        and rows.are_apart
        and len(heads) == len(rows.seq_lens)
        and form.chunks == "own"
        and covers(q, kv_cache, rows, form)
    )


def has_tiles(q: Tensor, kv_cache: Tensor) -> bool:
    """Returns True if queries and pages are such that kernels read them, and fit the registers."""
    group, head_dim = q.shape[1] // kv_cache.shape[2], q.shape[2]
    return (
        q.dtype in kv_rows.PLAIN_KINDS
        and 16 <= head_dim <= (kv_rows.MAX_HEAD_DIM if q.dtype.itemsize == 2 else MAX_PROMPT_HEAD_DIM)
        and triton.next_power_of_2(group) * triton.next_power_of_2(head_dim) <= MAX_TILE
        and kv_rows.has_kernels(kv_cache, head_dim)
    )


def has_prompt_tiles(head_dim: int, cache_dtype: torch.dtype) -> bool:
    """Returns True if rows of several tokens have tiles for heads of this size."""
    if head_dim <= MAX_PROMPT_HEAD_DIM:
        return True
    return head_dim % MAX_PROMPT_HEAD_DIM == 0 and cache_dtype not in kv_rows.KINDS


class Attention:
    """Attention over pages on one device, with the counters that its programs share.

    Launches follow one another: those of two streams at once would count each other's programs.

    Attributes:
        num_programs: of a launch for rows of one token, at most.
    """

    def __init__(self, device: torch.device) -> None:
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []
        self.num_programs = INTERPRETER_PROGRAMS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self.num_programs = PROGRAMS_PER_PROCESSOR * processors

    def attend(
        self, q: Tensor, kv_cache: Tensor, rows: PagedRows, form: AttentionForm, lse: Tensor | None = None
    ) -> Tensor:
        """Runs `Backend.attention` for what `covers` accepts. `lse` is filled as by `Backend.partial_attention`."""
        q = q.contiguous()
        out = torch.empty_like(q)
        num_rows = len(rows.seq_lens)
        is_decode = rows.max_query_len == 1
        if not is_decode:
            _attend_prompts(q, kv_cache, rows, form, out, lse)
        if is_decode or num_rows > 1 or len(q) == 1:
            self._decode(q, kv_cache, rows, form, out, lse)
        return out

    def _decode(
        self, q: Tensor, kv_cache: Tensor, rows: PagedRows, form: AttentionForm, out: Tensor, lse: Tensor | None
    ) -> None:
        """Computes the rows of one token."""
        work = self._work(q, kv_cache, rows, form)
        decode_attention(
            work.grid,
            q, in_octets(kv_cache), out, lse, None if rows.max_query_len == 1 else rows.query_starts,
            rows.seq_lens, rows.prefix_spans, rows.block_tables, *work.tensors, *work.numbers, **work.constants,
        )  # fmt: skip

    def rotate_and_attend(self, new: NewHeads, rows: PagedRows, form: AttentionForm) -> Tensor:
        """Runs `Backend.rotate_and_attend` for rows of one token, of which none has a prefix."""
        heads, kv_cache, cos = aligned(new.heads), new.kv_cache, new.cos.contiguous()
        num_heads, head_dim = heads.shape[1] - 2 * kv_cache.shape[2], heads.shape[2]
        out = torch.empty(len(heads), num_heads, head_dim, dtype=heads.dtype, device=heads.device)
        if not len(heads):
            return out
        work = self._work(out, kv_cache, rows, form)
        weight, eps = new.norm or (None, 0.0)
        rotate_and_attend(
            work.grid,
            heads, cos, new.sin.contiguous(), new.slot_mapping, weight, new.scales, in_octets(kv_cache), out,
            rows.seq_lens, rows.block_tables, *work.tensors, heads.stride(0), float(eps), *work.numbers,
            ROTARY_DIM=cos.shape[-1], **work.constants,
        )  # fmt: skip
        return out

    def _work(self, q: Tensor, kv_cache: Tensor, rows: PagedRows, form: AttentionForm) -> "_Work":
        """Chooses grid and tiles for rows of one token, and allocates the memory of their splits."""
        num_rows, (_, num_heads, head_dim) = len(rows.seq_lens), q.shape
        num_kv_heads, _, row = kv_cache.shape[2:]
        group = num_heads // num_kv_heads
        tiles = decode_tiles(group, head_dim, q.dtype, kv_cache.dtype)
        splits = num_splits(rows.max_seq_len)
        max_parts = parts_that_wait(num_rows, splits, num_heads, head_dim)
        parts = q.new_empty(max_parts * num_heads * head_dim, dtype=torch.float32)
        part_sums = q.new_empty(max_parts * num_heads * 2, dtype=torch.float32)
        return _Work(
            (min(self.num_programs, num_rows * num_kv_heads * splits),),
            (form.sinks, form.slopes, form.distance_bias, parts, part_sums, self.counters(num_rows * num_kv_heads)),
            (
                num_rows, num_kv_heads, group, rows.block_tables.stride(0), kv_cache.stride(0),
                kv_rows.page_shift(kv_cache), max_parts, *form_numbers(form),
            ),
            dict(
                **form_constants(form), HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
                BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
                BLOCK_ROWS=next(size for size in ROW_BUCKETS if size >= num_rows), ROW=row,
                KIND=kv_rows.kind_of(kv_cache.dtype), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            ),
        )  # fmt: skip

    def counters(self, count: int) -> Tensor:
        """Returns counters, all 0; a launch leaves them so."""
        if count <= len(self._counters):
            return self._counters
        device = self._counters.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=device)  # the recording's own, and zeroed by it
        self._outgrown.append(self._counters)  # recordings count in it
        self._counters = torch.zeros(max(1 << 16, count), dtype=torch.int32, device=device)
        return self._counters


class _Work(NamedTuple):
    """What the launches of decode kernels have in common.

    Attributes:
        tensors: of the form, then the memory of splits that wait, and counters.
        numbers: sizes, strides, and those of the form.
        constants: the kernel's, its warps and stages.
    """

    grid: tuple[int]
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]


def _attend_prompts(
    q: Tensor, kv_cache: Tensor, rows: PagedRows, form: AttentionForm, out: Tensor, lse: Tensor | None
) -> None:
    """Computes the rows of several tokens."""
    num_rows, (num_tokens, num_heads, head_dim) = len(rows.seq_lens), q.shape
    num_kv_heads, _, row = kv_cache.shape[2:]
    group = num_heads // num_kv_heads
    tiles = prompt_tiles(group * rows.max_query_len, group, head_dim, q.dtype, kv_cache.dtype)
    block_q, values = tiles.block_m // group, min(head_dim, MAX_PROMPT_HEAD_DIM)
    prompt_attention(
        (num_kv_heads, num_blocks(num_tokens, num_rows, block_q), head_dim // values),
        q, in_octets(kv_cache), out, lse, rows.query_starts, rows.seq_lens, rows.prefix_spans, rows.block_tables,
        form.sinks, form.slopes, form.distance_bias,
        num_rows, num_kv_heads, group, block_q, rows.block_tables.stride(0), kv_cache.stride(0),
        kv_rows.page_shift(kv_cache), *form_numbers(form),
        **form_constants(form), HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), VALUES=values,
        BLOCK_V=triton.next_power_of_2(values), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, ROW=row,
        KIND=kv_rows.kind_of(kv_cache.dtype), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def parts_that_wait(num_rows: int, splits: int, num_heads: int, head_dim: int) -> int:
    """The most splits of a launch whose results wait in memory; 0 if rows are not split."""
    if splits == 1:
        return 0
    return min(num_rows * splits, MAX_PART_BYTES // (4 * num_heads * (head_dim + 2)))


def form_numbers(form: AttentionForm) -> tuple[float, float, int, int, int, int]:
    """The scale, cap, windows, chunk and reach of a form, as the kernels take them."""
    scale = form.scale * LOG2_E if form.softcap is None else 2 * LOG2_E * form.scale / form.softcap
    reach = 0 if form.distance_bias is None else form.distance_bias.shape[1] // 2
    windows = [NO_WINDOW if each is None else min(each, NO_WINDOW) for each in (form.window, form.span_window)]
    return float(scale), float(form.softcap or 0), windows[0], windows[1], form.chunk or 0, reach


def form_constants(form: AttentionForm) -> dict[str, object]:
    """The kernels' constants of a form."""
    return {"CHUNKS": "none" if form.chunk is None else form.chunks, "HAS_SOFTCAP": form.softcap is not None}


def variants() -> Iterator[Variant]:
    """The kernels of heads of usual sizes, and of sinks and caps; page sizes and windows are no constants."""
    forms: list[tuple[int, dict[str, object]]] = [
        *((size, {}) for size in (64, 128, 256, 512)),
        (64, {"sinks_ptr": "*fp32"}),
        (256, {"HAS_SOFTCAP": True}),
    ]
    for name, (head_dim, form) in itertools.product(USUAL, forms):
        yield from _variants_of_heads(name, head_dim, None, form)
    for (cache_dtype, has_scales), head_dim in itertools.product(QUANTIZED_FORMS, (64, 128, 256)):
        scales: dict[str, object] = {"scales_ptr": "*fp32"} if has_scales else {}
        yield from _variants_of_heads(USUAL[0], head_dim, cache_dtype, scales)


def _variants_of_heads(
    name: str, head_dim: int, cache_dtype: torch.dtype | None, form: dict[str, object]
) -> Iterator[Variant]:
    """`cache_dtype` is that of a quantized cache."""
    dtype = {known: dtype for dtype, known in FLOATS.items()}[name]
    tiles, scaled = decode_tiles(1, head_dim, dtype, cache_dtype or dtype), "scales_ptr" in form
    rows = {"BLOCK_ROWS": ROW_BUCKETS[0], **form}
    for norm in (None,) if form and not scaled else (None, f"*{name}"):
        rotated = {**rows, "weight_ptr": norm, "ROTARY_DIM": head_dim}
        yield _variant(rotate_and_attend, name, head_dim, cache_dtype, tiles, rotated)
    if scaled:  # which only kernels that store have
        return
    for starts in (None, "*i32"):  # in decode steps, and beside prompts
        yield _variant(decode_attention, name, head_dim, cache_dtype, tiles, {**rows, "starts_ptr": starts})
    if has_prompt_tiles(head_dim, cache_dtype or dtype):
        for own in sorted({prompt_tiles(lanes, 1, head_dim, dtype, cache_dtype or dtype) for lanes in (64, 65)}):
            yield _variant(prompt_attention, name, head_dim, cache_dtype, own, form)


def _variant(
    kernel: Kernel,
    name: str,
    head_dim: int,
    cache_dtype: torch.dtype | None,
    tiles: Tiles,
    form: dict[str, object],
) -> Variant:
    scalars = dict.fromkeys(("scale", "softcap", "eps"), "fp32")
    tensors = ("q_ptr", "heads_ptr", "cos_ptr", "sin_ptr", "cache_ptr", "out_ptr")
    pointers = {**dict.fromkeys(tensors, f"*{name}"), "slots_ptr": "*i64"}
    if cache_dtype is not None:
        pointers["cache_ptr"] = "*u8"
    ids = dict.fromkeys(("starts_ptr", "seq_lens_ptr", "tables_ptr", "counters_ptr"), "*i32")
    types: dict[str, Any] = {**scalars, **pointers, **ids, **dict.fromkeys(("parts_ptr", "part_sums_ptr"), "*fp32")}
    absent = ("lse_ptr", "prefix_spans_ptr", "scales_ptr", "sinks_ptr", "slopes_ptr", "bias_ptr")
    constants: dict[str, object] = {
        "HEAD_DIM": head_dim, "BLOCK_D": head_dim, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "ROW": head_dim if cache_dtype is None else row_size(head_dim, cache_dtype),
        "KIND": "plain" if cache_dtype is None else kv_rows.kind_of(cache_dtype),
        "CHUNKS": "none", "HAS_SOFTCAP": False, **dict.fromkeys(each for each in absent if each in kernel.parameters),
    }  # fmt: skip
    for key, value in form.items():
        if isinstance(value, str):
            types[key] = value
            constants.pop(key, None)
        else:
            constants[key] = value
    if kernel is prompt_attention:
        constants["VALUES"] = constants["BLOCK_V"] = min(head_dim, MAX_PROMPT_HEAD_DIM)
    typed = {each: types.get(each, "i32") for each in kernel.parameters if each not in constants}
    reason = "64 rows for each four warps" if kernel is prompt_attention else "16 rows hold a KV head's query heads"
    kind = "" if cache_dtype is None else kv_rows.kind_of(cache_dtype)
    return Variant(kernel, typed, constants, tiles.num_warps, tiles.num_stages, reason, kind)
