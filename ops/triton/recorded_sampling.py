"""Sampling inside of CUDA graphs: penalties and temperature, and the tokens' ways to the request table and the host.

Logits that change are written to memory of their own, as float32. Before, this memory holds the counts of tokens: those
of the output, and a bit for those of the prompt. Rows without penalties have no counts, and none is written for them.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.sampling import RowParameters, TokenPlaces
from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import UNIT, USUAL, VECTOR
from quire.ops.triton.variants import Variant

_TILE = 4096
_TOKENS = 1024
_MOST_PARTS = 16
"""Programs that count one row's tokens."""

_ROWS = 128
_IN_PROMPT = tl.constexpr(1 << 30)


@Kernel
def clear_counts(repetition_ptr, frequency_ptr, presence_ptr, counts_ptr, size, TILE: tl.constexpr):
    """`size` counts vectors, here and below."""
    row = tl.program_id(0).to(tl.int64)
    if _is_penalized(repetition_ptr + row, frequency_ptr + row, presence_ptr + row):
        columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
        nothing = tl.zeros([TILE], tl.int32)
        tl.store(counts_ptr + row * (size * UNIT) + columns, nothing, mask=columns < size * UNIT)


@Kernel
def count_tokens(
    table_ptr, slots_ptr, positions_ptr, num_unnamed_ptr, num_prompt_tokens_ptr, repetition_ptr, frequency_ptr,
    presence_ptr, counts_ptr, num_columns, size, TOKENS: tl.constexpr,
):  # fmt: skip
    """Counts a row's tokens; programs of one row take parts of them in turns."""
    row = tl.program_id(0).to(tl.int64)
    if _is_penalized(repetition_ptr + row, frequency_ptr + row, presence_ptr + row):
        tokens_ptr = table_ptr + tl.load(slots_ptr + row) * num_columns
        counts_ptr += row * (size * UNIT)
        end = tl.load(positions_ptr + row).to(tl.int32)
        first, prompt_end = tl.load(num_unnamed_ptr + row), tl.load(num_prompt_tokens_ptr + row)
        start = first + tl.program_id(1) * TOKENS
        while start < end:
            columns = start + tl.arange(0, TOKENS)
            tokens = tl.load(tokens_ptr + columns, mask=columns < end, other=-1)
            is_known = (tokens >= 0) & (tokens < size * UNIT)
            tl.atomic_add(counts_ptr + tokens, 1, mask=is_known & (columns >= prompt_end), sem="relaxed")
            tl.atomic_or(counts_ptr + tokens, _IN_PROMPT, mask=is_known & (columns < prompt_end), sem="relaxed")
            start += tl.num_programs(1) * TOKENS


@Kernel
def temper_rows(
    logits_ptr, repetition_ptr, frequency_ptr, presence_ptr, temperature_ptr, out_ptr, size, stride, TILE: tl.constexpr
):
    """Penalized logits, divided by the temperature, over the counts in `out`; `stride` counts vectors, too."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < size * UNIT
    at = out_ptr + row * (size * UNIT) + columns
    x = tl.load(logits_ptr + row * (stride * UNIT) + columns, mask=mask, other=0.0).to(tl.float32)
    if _is_penalized(repetition_ptr + row, frequency_ptr + row, presence_ptr + row):
        counts = tl.load(at, mask=mask, other=0)
        in_output = (counts & (_IN_PROMPT - 1)).to(tl.float32)
        repetition = tl.load(repetition_ptr + row)
        seen = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        presence = tl.load(presence_ptr + row) * (in_output > 0).to(tl.float32)
        seen -= tl.load(frequency_ptr + row) * in_output + presence
        x = tl.where(counts != 0, seen, x)
    x = tl.div_rn(x, tl.load(temperature_ptr + row))
    tl.store(at, x.to(tl.int32, bitcast=True), mask=mask)


@Kernel
def write_tokens(
    token_ids_ptr, usable_ptr, places_ptr, turn_ptr, memory_ptr, ring_ids_ptr, ring_usable_ptr, num_rows, ring_size,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Writes tokens to `places` of `memory` and to a row of the ring, which has `ring_size` units of 16 bytes."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    token_ids = tl.load(token_ids_ptr + rows, mask=mask, other=0)
    tl.store(memory_ptr + tl.load(places_ptr + rows, mask=mask, other=0), token_ids.to(tl.int32), mask=mask)
    turn = tl.load(turn_ptr) * ring_size
    tl.store(ring_ids_ptr + turn * 2 + rows, token_ids, mask=mask)
    start = (num_rows + 1) // 2 * 16
    usable = tl.load(usable_ptr + rows, mask=mask, other=0)
    tl.store(ring_usable_ptr + turn * 16 + start + rows, usable, mask=mask)


@triton.jit
def _is_penalized(repetition_ptr, frequency_ptr, presence_ptr):
    return (tl.load(repetition_ptr) != 1) | (tl.load(frequency_ptr) != 0) | (tl.load(presence_ptr) != 0)


def temper(logits: Tensor, rows: RowParameters, table: Tensor) -> Tensor:
    """Returns logits [num_rows, vocab_size] float32 after penalties and temperature."""
    num_rows, size = logits.shape[0], logits.shape[1] // VECTOR
    out = torch.empty(logits.shape, dtype=torch.int32, device=logits.device)
    penalties = rows.repetition, rows.frequency, rows.presence
    tiles = num_rows, triton.cdiv(logits.shape[1], _TILE)
    clear_counts(tiles, *penalties, out, size, TILE=_TILE)
    parts = min(_MOST_PARTS, triton.cdiv(table.shape[1], _TOKENS))
    count_tokens(
        (num_rows, parts), table, rows.slots, rows.positions, rows.num_unnamed, rows.num_prompt_tokens, *penalties, out,
        table.shape[1], size, TOKENS=_TOKENS,
    )  # fmt: skip
    temper_rows(
        tiles, logits, *penalties, rows.temperature, out, size, logits.stride(0) // VECTOR, TILE=_TILE, num_warps=8
    )  # fmt: skip
    return out.view(torch.float32)


def deliver(token_ids: Tensor, usable: Tensor, to: TokenPlaces) -> None:
    """Writes tokens to the table and the ring; `usable` are bytes."""
    num_rows, ring_size = len(token_ids), to.ring.shape[1] // 16
    write_tokens(
        (triton.cdiv(num_rows, _ROWS),), token_ids, usable, to.places, to.turn, to.memory, to.ring.view(torch.int64),
        to.ring.view(torch.int8), num_rows, ring_size, ROWS=_ROWS,
    )  # fmt: skip


def variants(names: tuple[str, ...] = USUAL) -> Iterator[Variant]:
    """All that a server may launch for logits of these types, by Triton's names, and of float32."""
    yield _variant(clear_counts, {"TILE": _TILE}, "4,096 counts: 8 vectors a thread")
    yield _variant(count_tokens, {"TOKENS": _TOKENS}, "1,024 tokens: 8 atomic operations in flight a thread")
    for name in (*names, "fp32"):
        yield _variant(temper_rows, {"TILE": _TILE}, "4,096 logits: 2 vectors in flight a thread", name, num_warps=8)
    yield _variant(write_tokens, {"ROWS": _ROWS}, "a row a thread")


def _variant(kernel: Kernel, constants: dict[str, object], reason: str, name: str = "", num_warps: int = 4) -> Variant:
    types = {
        **dict.fromkeys(("size", "stride", "num_rows", "num_columns", "ring_size"), "i32"),
        **dict.fromkeys(("token_ids_ptr", "slots_ptr", "positions_ptr", "places_ptr", "turn_ptr"), "*i64"),
        **dict.fromkeys(("table_ptr", "num_unnamed_ptr", "num_prompt_tokens_ptr", "memory_ptr"), "*i32"),
        **dict.fromkeys(("counts_ptr", "out_ptr"), "*i32"),
        **dict.fromkeys(("repetition_ptr", "frequency_ptr", "presence_ptr", "temperature_ptr"), "*fp32"),
        **dict.fromkeys(("usable_ptr", "ring_usable_ptr"), "*i8"),
        "ring_ids_ptr": "*i64",
        "logits_ptr": f"*{name}",
    }
    typed = {each: types[each] for each in kernel.parameters if each not in constants}
    return Variant(kernel, typed, constants, num_warps, 3, reason)
