"""Scores of chosen and of the likeliest tokens, inside of CUDA graphs; see `quire.ops.sampling.read_scores`.

A row of logits is read in tiles by programs of their own, which keep the tile's likeliest tokens. One program a row
then puts the tiles together. The order of tokens is that of whole numbers, made of a logit and an id.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.sampling import MAX_SCORED, ScorePlaces
from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import UNIT, USUAL, VECTOR
from quire.ops.triton.variants import Variant

_TILE = 4096
_MOST_TILES = 128
_NEVER = tl.constexpr(-(1 << 63))


@Kernel
def score_tiles(
    logits_ptr, token_ids_ptr, most_ptr, total_ptr, above_ptr, keys_ptr, size, stride, num_tiles, TILE: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Of a tile: its greatest logit, the sum of e^(logit - greatest), how many logits are above that of the row's
    chosen token, and the keys of the `COUNT` likeliest tokens. `size` and `stride` count vectors.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    mask = columns < size * UNIT
    row_ptr = logits_ptr + row * (stride * UNIT)
    x = tl.load(row_ptr + columns, mask=mask, other=float("-inf")).to(tl.float32)
    own = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    most = tl.max(x, 0)
    weights = tl.exp(x - tl.where(most == float("-inf"), 0.0, most))
    at = row * num_tiles + tile
    tl.store(most_ptr + at, most)
    tl.store(total_ptr + at, tl.sum(weights, 0))
    tl.store(above_ptr + at, tl.sum((x > own).to(tl.int32), 0))
    keys = tl.where(mask, _key(x, columns), _NEVER)
    for place in range(COUNT):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + at * COUNT + place, best)
        keys = tl.where(keys == best, _NEVER, keys)


@Kernel
def score_rows(
    logits_ptr, token_ids_ptr, most_ptr, total_ptr, above_ptr, keys_ptr, turn_ptr, ring_ptr, stride, num_tiles,
    ring_rows, ARE_LOGPROBS: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Puts a row's tiles together, and writes ids, scores and the chosen token's place into the ring.

    `ALL` is a power of two of at least `TILES * COUNT`.
    """
    row, tiles, places = tl.program_id(0).to(tl.int64), tl.arange(0, TILES), tl.arange(0, ALL)
    mask = tiles < num_tiles
    of_tiles = tl.load(most_ptr + row * num_tiles + tiles, mask=mask, other=float("-inf"))
    most = tl.max(of_tiles, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    totals = tl.load(total_ptr + row * num_tiles + tiles, mask=mask, other=0.0) * tl.exp(of_tiles - base)
    log_total = tl.log(tl.sum(totals, 0)) if ARE_LOGPROBS else 0.0
    shift = most if ARE_LOGPROBS else 0.0
    above = tl.sum(tl.load(above_ptr + row * num_tiles + tiles, mask=mask, other=0), 0)
    token_id = tl.load(token_ids_ptr + row)
    own = tl.load(logits_ptr + row * (stride * UNIT) + token_id).to(tl.float32)
    out_ptr = ring_ptr + (tl.load(turn_ptr) * ring_rows + row) * (2 * COUNT + 3)
    tl.store(out_ptr, token_id.to(tl.int32))
    tl.store(out_ptr + COUNT + 1, (own - shift - log_total).to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * COUNT + 2, above + 1)
    keys = tl.load(keys_ptr + row * num_tiles * COUNT + places, mask=places < num_tiles * COUNT, other=_NEVER)
    for place in range(COUNT):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, _NEVER, keys)
        ids = -best & 0xFFFFFFFF
        score = _number((best + ids) >> 32) - shift - log_total
        tl.store(out_ptr + 1 + place, ids.to(tl.int32))
        tl.store(out_ptr + COUNT + 2 + place, score.to(tl.int32, bitcast=True))


@triton.jit
def _key(x, ids):
    """A whole number that is ordered as the float32, and where two are equal, against the ids."""
    bits = (x + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    ordered = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return (ordered << 32) - ids


@triton.jit
def _number(ordered):
    """The float32 of the upper half of a key."""
    bits = tl.where(ordered < 0, -ordered | 0x80000000, ordered)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


def score(logits: Tensor, token_ids: Tensor, turn: Tensor, to: ScorePlaces) -> None:
    """Writes the scores of `token_ids` [num_rows] and of the likeliest tokens to a turn of the ring, [1] int64."""
    (num_rows, size), device = logits.shape, logits.device
    num_tiles, stride = triton.cdiv(size, _TILE), logits.stride(0) // VECTOR
    most, total = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=device)
    above = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    keys = torch.empty(num_rows, num_tiles * MAX_SCORED, dtype=torch.int64, device=device)
    score_tiles(
        (num_rows, num_tiles), logits, token_ids, most, total, above, keys, size // VECTOR, stride, num_tiles,
        TILE=_TILE, COUNT=MAX_SCORED, num_warps=8,
    )  # fmt: skip
    score_rows(
        (num_rows,), logits, token_ids, most, total, above, keys, turn, to.ring, stride, num_tiles, to.ring.shape[1],
        ARE_LOGPROBS=to.are_logprobs, TILES=_MOST_TILES, COUNT=MAX_SCORED,
        ALL=triton.next_power_of_2(_MOST_TILES * MAX_SCORED), num_warps=8,
    )  # fmt: skip


def variants(names: tuple[str, ...] = USUAL) -> Iterator[Variant]:
    """All that a server may launch for logits of these types, by Triton's names, and of float32."""
    types = {
        **dict.fromkeys(("token_ids_ptr", "turn_ptr", "keys_ptr"), "*i64"),
        **dict.fromkeys(("above_ptr", "ring_ptr"), "*i32"),
        **dict.fromkeys(("most_ptr", "total_ptr"), "*fp32"),
    }
    tiles: dict[str, object] = {"TILE": _TILE, "COUNT": MAX_SCORED}
    most = triton.next_power_of_2(_MOST_TILES * MAX_SCORED)
    rows: dict[str, object] = {"TILES": _MOST_TILES, "COUNT": MAX_SCORED, "ALL": most}
    forms = [
        (score_tiles, tiles, "4,096 logits: 16 a thread"),
        *((score_rows, rows | {"ARE_LOGPROBS": each}, "4,096 keys: 16 a thread") for each in (True, False)),
    ]
    for name in (*names, "fp32"):
        for kernel, constants, reason in forms:
            own = {**types, "logits_ptr": f"*{name}"}
            typed = {each: own.get(each, "i32") for each in kernel.parameters if each not in constants}
            yield Variant(kernel, typed, constants, 8, 3, reason)
