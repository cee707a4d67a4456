"""Sampling on the device: masks of grammars, the likeliest token, and draws by inverting the cumulative softmax.

A row of logits is read in tiles by programs of their own, and one program then puts the tiles together: two launches,
whatever the number of rows. A row's result depends on that row alone.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.eager.sampling import EagerSampling
from quire.ops.host_arrays import to_device
from quire.ops.sampling import RowParameters, TokenPlaces, new_tokens
from quire.ops.triton import likely_tokens, recorded_sampling, token_logprobs
from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import FLOATS, UNIT, USUAL, VECTOR, are_aligned, are_whole
from quire.ops.triton.variants import Variant

_CHUNK = 512
"""Tokens whose weights are summed in float32; the running sums over these sums are float64, as in plain torch."""

_TILE = 4096
_MOST_TILES = 128
_WORD = 32


@Kernel
def mask_rows(logits_ptr, rows_ptr, words_ptr, size, stride, num_words, TILE_WORDS: tl.constexpr):
    """Sets logits of `rows` to -inf where the bit of a row of words is 0; `size` and `stride` count vectors."""
    number = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * TILE_WORDS + tl.arange(0, TILE_WORDS)[:, None]
    bit = tl.arange(0, 32)[None, :]
    allowed = tl.load(words_ptr + number * num_words + words, mask=words < num_words, other=0)
    columns = words * 32 + bit
    at = logits_ptr + tl.load(rows_ptr + number) * (stride * UNIT) + columns
    mask = columns < size * UNIT
    logits = tl.load(at, mask=mask, other=0.0)
    never = tl.full(logits.shape, float("-inf"), logits.dtype)
    tl.store(at, tl.where((allowed >> bit) & 1 != 0, logits, never), mask=mask)


@Kernel
def likeliest_of_tiles(logits_ptr, most_ptr, first_ptr, size, stride, num_tiles, TILE: tl.constexpr):
    """The greatest logit of a tile, NaN if it has one, and its first place; `size` and `stride` count vectors."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + row * (stride * UNIT) + columns, mask=columns < size * UNIT, other=float("-inf"))
    x, most = _with_most(x.to(tl.float32))
    tl.store(first_ptr + row * num_tiles + tile, tl.min(tl.where(x == most, columns, 2147483647), 0))
    tl.store(most_ptr + row * num_tiles + tile, most)


@Kernel
def likeliest_of_rows(most_ptr, first_ptr, wanted_ptr, token_ids_ptr, usable_ptr, num_tiles, TILES: tl.constexpr):
    """The row's token from those of its tiles: the first of the greatest. Rows that are not wanted stay as they are."""
    row, tiles = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    is_wanted = True if wanted_ptr is None else tl.load(wanted_ptr + row) != 0
    mask = tiles < num_tiles
    of_tiles, most = _with_most(tl.load(most_ptr + row * num_tiles + tiles, mask=mask, other=float("-inf")))
    first = tl.load(first_ptr + row * num_tiles + tiles, mask=mask & (of_tiles == most), other=2147483647)
    is_usable = tl.abs(most) < float("inf")  # NaN is not
    tl.store(token_ids_ptr + row, tl.where(is_usable, tl.min(first, 0), 0).to(tl.int64), mask=is_wanted)
    tl.store(usable_ptr + row, is_usable.to(tl.int8), mask=is_wanted)


@Kernel
def sum_chunks(logits_ptr, most_ptr, sums_ptr, size, stride, num_tiles, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """The greatest logit of a tile, and sums of e^(logit - greatest) for its chunks."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tile * CHUNKS + tl.arange(0, CHUNKS)
    columns = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits_ptr + row * (stride * UNIT) + columns, mask=columns < size * UNIT, other=float("-inf"))
    x = x.to(tl.float32)
    _, most = _with_most(tl.max(tl.where(x != x, float("inf"), x), 1))
    tl.store(most_ptr + row * num_tiles + tile, most)
    tl.store(sums_ptr + row * num_tiles * CHUNKS + chunks, tl.sum(_weight(x, most), 1))


@Kernel
def invert_rows(
    logits_ptr, most_ptr, sums_ptr, starts_ptr, positions_ptr, token_ids_ptr, usable_ptr, size, stride, num_tiles,
    TILES: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The token at which the running sum of a row's weights first exceeds its random share of the total."""
    row = tl.program_id(0).to(tl.int64)
    tiles, chunks = tl.arange(0, TILES), tl.arange(0, TILES * CHUNKS)
    of_tiles = tl.load(most_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    most = tl.max(of_tiles, 0)

    is_chunk = chunks < num_tiles * CHUNKS
    sums = tl.load(sums_ptr + row * num_tiles * CHUNKS + chunks, mask=is_chunk, other=0.0)
    of_chunks = tl.load(most_ptr + row * num_tiles + chunks // CHUNKS, mask=is_chunk, other=float("-inf"))
    sums = (sums * _weight(of_chunks, most)).to(tl.float64)
    total = tl.sum(sums, 0)
    target = _uniform(tl.load(starts_ptr + row), tl.load(positions_ptr + row)) * total
    chunk = _place(sums, chunks, target)
    before = tl.sum(tl.where(chunks < chunk, sums, 0.0), 0)

    offsets = tl.arange(0, CHUNK)
    columns = chunk * CHUNK + offsets
    mask = columns < size * UNIT
    x = tl.load(logits_ptr + row * (stride * UNIT) + columns, mask=mask, other=float("-inf")).to(tl.float32)
    weights = _weight(x, most)
    if tl.max(weights, 0) == 0:  # each is too small for a float32, though their sum is not
        weights = (x == tl.max(x, 0)).to(tl.float32)
    token_id = chunk * CHUNK + _place(weights.to(tl.float64), offsets, target - before)

    is_usable = (tl.abs(most) < float("inf")) & (total > 0) & (total < float("inf"))
    tl.store(token_ids_ptr + row, tl.where(is_usable, token_id, 0).to(tl.int64))
    tl.store(usable_ptr + row, is_usable.to(tl.int8))


@triton.jit
def _with_most(x):
    """`x` with NaN as -inf, and the greatest of it, which is NaN if `x` has one."""
    is_nan = x != x
    x = tl.where(is_nan, float("-inf"), x)
    return x, tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), tl.max(x, 0))


@triton.jit
def _weight(x, most):
    """e^(x - most); 0 for -inf, if `most` is -inf as well."""
    return tl.exp(x - tl.where(most == float("-inf"), 0.0, most))


@triton.jit
def _place(weights, places, target):
    """The first place with a weight at which the running sum exceeds `target`, or else the last with a weight."""
    has_weight = weights > 0
    above = tl.where(has_weight & (tl.cumsum(weights, 0) > target), places, 2147483647)
    return tl.minimum(tl.min(above, 0), tl.max(tl.where(has_weight, places, 0), 0))


@triton.jit
def _uniform(start, position):
    """See `quire.ops.random.uniforms`."""
    bits = start.to(tl.uint64, bitcast=True) + (position.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return ((bits ^ (bits >> 31)) >> 11).to(tl.float64) * (1.0 / (1 << 53))


class TritonSampling(EagerSampling):
    """What no kernel takes is left to plain torch: other types, and rows that are no whole vectors."""

    def apply_bitmask(self, logits: Tensor, rows: np.ndarray, bitmask: np.ndarray) -> None:
        num_words = -(-logits.shape[1] // _WORD)
        if not _are_rows(logits) or bitmask.shape != (len(rows), num_words):
            return super().apply_bitmask(logits, rows, bitmask)
        if not len(rows):
            return None
        index, words = to_device(rows, logits.device), to_device(bitmask, logits.device)
        tile_words = _TILE // _WORD
        mask_rows(
            (len(rows), triton.cdiv(num_words, tile_words)), logits, index, words, *_sizes(logits), num_words,
            TILE_WORDS=tile_words,
        )  # fmt: skip
        return None

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if not _are_rows(logits):
            return super().likeliest(logits)
        token_ids, usable = _tokens(logits)
        _find_likeliest(logits, None, token_ids, usable)
        return token_ids, usable.view(torch.bool)

    def draw(self, logits: Tensor, starts: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        if not _are_rows(logits):
            return super().draw(logits, starts, positions)
        num_rows = len(starts)
        numbers = np.zeros((2, num_rows + num_rows % 2), np.int64)  # the second row, too, begins where a pointer must
        numbers[:, :num_rows] = starts.view(np.int64), positions
        there = to_device(numbers, logits.device)[:, :num_rows]
        return self.draw_at(logits, there[0], there[1])

    def draw_at(self, logits: Tensor, starts: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`draw` for numbers [num_rows] int64 that are on the device; `starts` has the bits of uint64."""
        num_rows, size = logits.shape
        num_tiles, chunks, (token_ids, usable) = triton.cdiv(size, _TILE), _TILE // _CHUNK, _tokens(logits)
        most = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
        sums = torch.empty(num_rows, num_tiles * chunks, dtype=torch.float32, device=logits.device)
        sum_chunks(
            (num_rows, num_tiles), logits, most, sums, *_sizes(logits), num_tiles, CHUNKS=chunks, CHUNK=_CHUNK,
            num_warps=8,
        )  # fmt: skip
        invert_rows(
            (num_rows,), logits, most, sums, starts, positions, token_ids, usable, *_sizes(logits), num_tiles,
            TILES=_MOST_TILES, CHUNKS=chunks, CHUNK=_CHUNK,
        )  # fmt: skip
        return token_ids, usable.view(torch.bool)

    def keep_min_p(self, logits: Tensor, log_min_p: np.ndarray) -> Tensor:
        is_done = likely_tokens.keep(likely_tokens.keep_min_p_rows, logits, log_min_p)
        return logits if is_done else super().keep_min_p(logits, log_min_p)

    def keep_top_k(self, logits: Tensor, top_k: np.ndarray) -> Tensor:
        is_done = likely_tokens.keep(likely_tokens.keep_top_k_rows, logits, top_k)
        return logits if is_done else super().keep_top_k(logits, top_k)

    def keep_top_p(self, logits: Tensor, top_p: np.ndarray) -> Tensor:
        is_done = likely_tokens.keep(likely_tokens.keep_top_p_rows, logits, top_p)
        return logits if is_done else super().keep_top_p(logits, top_p)

    def is_recordable(self, logits: Tensor) -> bool:
        return _are_rows(logits)

    def choose(self, logits: Tensor, parameters: RowParameters | None, to: TokenPlaces) -> None:
        if not _are_rows(logits):
            return super().choose(logits, parameters, to)
        raw = logits
        if parameters is None:
            token_ids, usable = self.likeliest(logits)
        else:
            logits = recorded_sampling.temper(logits, parameters, to.table)
            likely_tokens.launch(likely_tokens.keep_min_p_rows, logits, parameters.log_min_p)
            likely_tokens.launch(likely_tokens.keep_top_k_rows, logits, parameters.top_k)
            likely_tokens.launch(likely_tokens.keep_top_p_rows, logits, parameters.top_p)
            token_ids, usable = self.draw_at(logits, parameters.starts, parameters.positions)
            _find_likeliest(logits, parameters.is_greedy, token_ids, usable.view(torch.int8))
        recorded_sampling.deliver(token_ids, usable.view(torch.int8), to)
        if to.scores is not None:
            token_logprobs.score(raw, token_ids, to.turn, to.scores)
        return None


def _find_likeliest(logits: Tensor, wanted: Tensor | None, token_ids: Tensor, usable: Tensor) -> None:
    """Writes the likeliest tokens of the rows that are `wanted` [num_rows] int8, or of all; `usable` are bytes."""
    (num_rows, size), device = logits.shape, logits.device
    num_tiles = triton.cdiv(size, _TILE)
    most = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    first = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    likeliest_of_tiles((num_rows, num_tiles), logits, most, first, *_sizes(logits), num_tiles, TILE=_TILE)
    likeliest_of_rows((num_rows,), most, first, wanted, token_ids, usable, num_tiles, TILES=_MOST_TILES)


def _tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized outputs: ids, and whether each is usable, as bytes."""
    token_ids, usable = new_tokens(len(logits), logits.device)
    return token_ids, usable.view(torch.int8)


def _sizes(logits: Tensor) -> tuple[int, int]:
    """Numbers of a row, and from one row to the next, in vectors."""
    return logits.shape[1] // VECTOR, logits.stride(0) // VECTOR


def _are_rows(logits: Tensor) -> bool:
    is_covered = logits.dtype in FLOATS and logits.stride(1) == 1 and 0 < logits.shape[1] <= _MOST_TILES * _TILE
    return is_covered and len(logits) > 0 and are_whole(*logits.stride()[:1], logits.shape[1]) and are_aligned(logits)


def variants(names: tuple[str, ...] = USUAL) -> Iterator[Variant]:
    """All that a server may launch for logits of these types, by Triton's names, and of float32."""
    chunks = {"CHUNKS": _TILE // _CHUNK, "CHUNK": _CHUNK}
    for name in (*names, "fp32"):
        yield _variant(mask_rows, {"TILE_WORDS": _TILE // _WORD}, 4, "4,096 logits: 4 vectors in flight a thread", name)
        yield _variant(likeliest_of_tiles, {"TILE": _TILE}, 4, "4,096 logits: 4 vectors in flight a thread", name)
        yield _variant(sum_chunks, chunks, 8, "4,096 logits: 2 vectors in flight a thread", name)
        yield _variant(invert_rows, {"TILES": _MOST_TILES, **chunks}, 4, "1,024 sums, 8 a thread", name)
    for absent in ({}, {"wanted_ptr": None}):
        yield _variant(likeliest_of_rows, {"TILES": _MOST_TILES, **absent}, 4, "a tile a thread")


def _variant(kernel: Kernel, constants: Mapping[str, object], num_warps: int, reason: str, name: str = "") -> Variant:
    types = {
        **dict.fromkeys(("size", "stride", "num_tiles", "num_words"), "i32"),
        **dict.fromkeys(("rows_ptr", "starts_ptr", "positions_ptr", "token_ids_ptr"), "*i64"),
        **dict.fromkeys(("words_ptr", "first_ptr"), "*i32"),
        **dict.fromkeys(("most_ptr", "sums_ptr"), "*fp32"),
        "logits_ptr": f"*{name}",
        **dict.fromkeys(("usable_ptr", "wanted_ptr"), "*i8"),
    }
    typed = {each: types[each] for each in kernel.parameters if each not in constants}
    return Variant(kernel, typed, constants, num_warps, 3, reason)
