"""The operations of multi-head latent attention against their formulas in float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops.backend import Backend
from quire.ops.cache_rows import LARGEST_CODE, decode_parts, encode, in_octets, row_size
from quire.ops.cpu.native import NativeBackend
from quire.ops.eager import attention_plan
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.latent import EagerLatent
from quire.ops.eager.linear import PlainLinear
from quire.ops.latent import CacheRows, NewLatents, Selection
from tests.ops.test_attention import GARBAGE, garbage_memory
from tests.ops.test_cache_rows import CODES, STEPS, note_decoded

torch.set_num_threads(1)

NORM_EPS = 1e-6


def in_rows(x: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`x` [num_tokens, sum of sizes] as rows that lie one after the other in a cache of `dtype`."""
    rows = [in_octets(encode(part, dtype)) for part in x.split(list(sizes), dim=-1)]
    return torch.cat(rows, dim=-1).view(dtype)


class Step:
    """Random latents in a cache with shuffled pages that lie apart; places that were not written hold garbage."""

    def __init__(
        self,
        ops: Backend,
        rows: list[tuple[int, int]],  # (query_len, seq_len)
        *,
        heads: int = 4,
        rank: int = 24,
        rotary_dim: int = 12,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        more: tuple[int, ...] = (),
        garbage: int | None = 0x46,
    ) -> None:
        """`more` are the sizes of what lies behind a token's latent and rotated key; `garbage` is as for heads."""
        random = torch.Generator().manual_seed(0)
        cache_dtype, sizes = cache_dtype or dtype, (rank, rotary_dim, *more)
        row = sum(row_size(size, cache_dtype) for size in sizes)
        self.ops = ops
        self.rank, self.scale = rank, (rank + rotary_dim) ** -0.5
        self.query_lens, self.seq_lens = (np.array(column) for column in zip(*rows, strict=True))
        counts = -(-self.seq_lens // block_size)
        num_pages = int(counts.sum()) + 2
        order = (torch.randperm(num_pages - 1, generator=random) + 1).tolist()
        tables = np.full((len(rows), int(counts.max()) + 1), 10**6, np.int32)  # ids past a row's pages do not exist
        shape = (num_pages, block_size + 1, row + 8)
        memory = garbage_memory(shape, cache_dtype, garbage)
        memory.view(torch.uint8)[0] = 0xFF  # NaN; no row has this page
        self.cache = memory[:, :block_size, :row]
        self.latents: list[Tensor] = []
        slots = []
        for row, (query_len, seq_len) in enumerate(rows):
            pages = np.array([order.pop() for _ in range(counts[row])])
            tables[row, : len(pages)] = pages
            latents = torch.randn(seq_len, sum(sizes), generator=random).to(dtype)
            positions = np.arange(seq_len)
            rows_of_codes = in_rows(latents, sizes, cache_dtype)
            in_octets(self.cache)[pages[positions // block_size], positions % block_size] = in_octets(rows_of_codes)
            if cache_dtype in LARGEST_CODE:
                latents = decode_parts(rows_of_codes, sizes, torch.float32)
            slot = torch.from_numpy(pages[positions // block_size] * block_size + positions % block_size)
            slots.append(slot[seq_len - query_len :])
            self.latents.append(latents)
        num_tokens = int(self.query_lens.sum())
        self.q = torch.randn(heads, num_tokens, rank, generator=random).to(dtype).transpose(0, 1)
        self.q_rotated = torch.randn(num_tokens, heads, rotary_dim, generator=random).to(dtype)
        self.tables, self.slots, self.block_size = tables, torch.cat(slots), block_size

    def batch(self) -> Any:
        return self.ops.attention_batch(
            self.query_lens, self.seq_lens, self.tables, self.slots, block_size=self.block_size
        )

    def run(self) -> Tensor:
        return self.ops.latent.latent_attention(self.q, self.q_rotated, self.cache, self.batch(), scale=self.scale)

    def run_partly(self) -> tuple[Tensor, Tensor]:
        batch = self.batch()
        return self.ops.latent.partial_latent_attention(self.q, self.q_rotated, self.cache, batch, scale=self.scale)

    def expected(self) -> Tensor:
        return self.expected_parts()[0]

    def expected_parts(self) -> tuple[Tensor, Tensor]:
        """Outputs, and the logarithms of the softmaxes' denominators."""
        queries = torch.cat((self.q, self.q_rotated), dim=-1).double()
        results, sums, token = [], [], 0
        for query_len, seq_len, latents in zip(self.query_lens, self.seq_lens, self.latents, strict=True):
            for position in range(seq_len - query_len, seq_len):
                keys = latents[: position + 1, : queries.shape[-1]].double()
                scores = queries[token] @ keys.T * self.scale
                results.append(scores.softmax(dim=-1) @ keys[:, : self.rank])
                sums.append(scores.logsumexp(dim=-1))
                token += 1
        return torch.stack(results), torch.stack(sums)


MIXED = [(1, 1), (1, 37), (5, 5), (1, 130), (7, 40), (23, 23), (1, 64), (65, 65), (33, 170), (1, 300)]


@pytest.mark.parametrize(
    ("heads", "rank", "rotary_dim", "block_size"),
    [(4, 24, 12, 16), (1, 512, 64, 16), (16, 64, 8, 5), (7, 30, 6, 32), (40, 256, 32, 1)],
)
def test_mixed_batch(ops: Backend, heads: int, rank: int, rotary_dim: int, block_size: int) -> None:
    step = Step(ops, MIXED, heads=heads, rank=rank, rotary_dim=rotary_dim, block_size=block_size)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(ops: Backend, dtype: torch.dtype) -> None:
    step = Step(ops, MIXED, dtype=dtype)
    out = step.run()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), step.expected(), atol=3e-2, rtol=3e-2)


def test_a_cache_of_another_dtype(ops: Backend) -> None:
    step = Step(ops, MIXED, cache_dtype=torch.bfloat16)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("cache_dtype", CODES)
@pytest.mark.parametrize(("heads", "rank", "rotary_dim", "dtype"), [
    (4, 24, 12, torch.float32), (16, 66, 10, torch.float32), (1, 512, 64, torch.bfloat16), (40, 64, 32, torch.float16),
    (4, 24, 0, torch.float32),
])  # fmt: skip
def test_latents_are_read_as_codes(
    ops: Backend, cache_dtype: torch.dtype, heads: int, rank: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    """As exactly as plain numbers: those that the codes stand for."""
    step = Step(ops, MIXED, heads=heads, rank=rank, rotary_dim=rotary_dim, dtype=dtype, cache_dtype=cache_dtype)
    (expected, sums), (out, lse) = step.expected_parts(), step.run_partly()
    assert torch.equal(out, step.run())
    tolerance = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(lse.double(), sums, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_the_latents(ops: Backend, dtype: torch.dtype) -> None:
    step = Step(ops, MIXED, dtype=dtype)
    expected, sums = step.expected_parts()
    out, lse = step.run_partly()
    assert torch.equal(out, step.run())
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), sums, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_threads", [2, 5])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_long_contexts_are_cut_and_merged(
    own_native: NativeBackend, num_threads: int, cache_dtype: torch.dtype | None
) -> None:
    """Threads divide the keys of one request, and the result is that of one thread to the bit."""
    step = Step(own_native, [(1, 9000), (2, 4097), (1, 2048)], heads=8, cache_dtype=cache_dtype)
    (alone, lse), (expected, sums) = step.run_partly(), step.expected_parts()
    torch.testing.assert_close(alone.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(lse.double(), sums, atol=2e-5, rtol=1e-4)
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(step.run(), alone)
        assert all(torch.equal(x, y) for x, y in zip(step.run_partly(), (alone, lse), strict=True))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 16])
def test_a_row_does_not_depend_on_its_batch(
    own_native: NativeBackend, heads: int, cache_dtype: torch.dtype | None
) -> None:
    many = Step(own_native, MIXED, heads=heads, cache_dtype=cache_dtype)
    together = many.run()
    ends = np.cumsum(many.query_lens)
    for row in (3, 7, 8):  # each alone, and its last token as a step of its own
        for query_len in (MIXED[row][0], 1):
            tokens = slice(int(ends[row]) - query_len, int(ends[row]))
            batch = own_native.attention_batch(
                np.array([query_len]), many.seq_lens[row : row + 1], many.tables[row : row + 1], many.slots[tokens],
                block_size=16,
            )  # fmt: skip
            out = own_native.latent.latent_attention(
                many.q[tokens], many.q_rotated[tokens], many.cache, batch, scale=many.scale
            )
            assert torch.equal(out, together[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs"), [(1, 128, 512), (3, 24, 17), (37, 20, 72), (70, 512, 128)]
)
def test_head_linear(ops: Backend, num_tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 3, inputs + 5).to(dtype)[..., :inputs]
    weight = (torch.randn(3, inputs, outputs) * inputs**-0.5).to(dtype)
    out = ops.latent.head_linear(x, weight)
    assert out.dtype == dtype
    expected = torch.einsum("thi,hio->tho", x.double(), weight.double())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("inputs", "outputs"), [(20, 24), (24, 18), (128, 512)])
def test_a_token_of_a_head_linear_does_not_depend_on_its_batch(
    native: NativeBackend, inputs: int, outputs: int
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(37, 4, inputs), torch.randn(4, inputs, outputs)
    together = native.latent.head_linear(x, weight)
    for first, count in ((0, 1), (3, 2), (5, 3), (7, 4), (8, 7)):
        assert torch.equal(native.latent.head_linear(x[first : first + count], weight), together[first : first + count])


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_and_store(ops: Backend, dtype: torch.dtype, is_interleaved: bool) -> None:
    torch.manual_seed(0)
    num_tokens, heads, rank, size, block_size = 5, 3, 30, 12, 4
    q, latent = torch.randn(num_tokens, heads, 40)[..., 28:], torch.randn(num_tokens, 50)[:, 8:]
    q, latent, weight = q.to(dtype), latent.to(dtype), (torch.rand(rank) + 0.5).to(dtype)
    frequencies = 10000.0 ** (-torch.arange(0, size, 2).double() / size)
    positions = torch.tensor([3, 900, 0, 17, 60])
    cos, sin = ops.rotation(positions, frequencies.float(), 1.0, dtype)
    cache = torch.zeros(3, block_size, rank + size + 4, dtype=dtype)[..., : rank + size]
    slots = torch.tensor([7, 0, 11, 2, 5])
    rotated = ops.latent.rotate_and_store_latent(
        NewLatents(q, latent, (weight, NORM_EPS), cos, sin, cache, slots, is_interleaved=is_interleaved)
    )

    def turn(x: Tensor) -> Tensor:  # [num_tokens, ..., size] as complex numbers
        pairs = x.double().unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
        numbers = torch.complex(*pairs.unbind(-1 if is_interleaved else -2))
        angles = positions.double()[:, None] * frequencies
        turned = numbers * torch.polar(torch.ones_like(angles), angles).view(len(x), *[1] * (x.dim() - 2), -1)
        return torch.cat((turned.real, turned.imag), dim=-1)

    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    stored = cache.flatten(0, 1)[slots].double()
    full = latent[:, :rank].double()
    normal = full * (full.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * weight.double()
    torch.testing.assert_close(rotated.double(), turn(q), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(stored[:, :rank], normal, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(stored[:, rank:], turn(latent[:, rank:]), atol=tolerance, rtol=tolerance)
    assert cache.flatten(0, 1)[[1, 3, 4, 6]].count_nonzero() == 0


@pytest.mark.parametrize("cache_dtype", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [12, 0])
def test_latents_are_stored_as_codes(ops: Backend, cache_dtype: torch.dtype, dtype: torch.dtype, size: int) -> None:
    """Latents and rotated keys with a scale each; what is not finite has become so; nothing else is written."""
    torch.manual_seed(0)
    rank, slots = 30, torch.tensor([7, 0, 11])
    latent = torch.randn(3, rank + size).to(dtype)
    latent[0, rank:] *= 50
    latent[1, rank + 2 :][:1], latent[2, rank + 3 :][:1] = torch.nan, torch.inf
    weight, (cos, sin) = (torch.rand(rank) + 0.5).to(dtype), torch.randn(2, 3, 1, size).to(dtype)
    row = row_size(rank, cache_dtype) + row_size(size, cache_dtype)
    plain, memory = torch.zeros(3, 4, rank + size, dtype=dtype), torch.zeros(3, 4, row + 4, dtype=torch.uint8)
    for cache in (plain, memory.view(cache_dtype)[..., :row]):
        ops.latent.rotate_and_store_latent(NewLatents(
            torch.zeros(3, 1, size, dtype=dtype), latent, (weight, NORM_EPS), cos, sin, cache, slots,
            is_interleaved=True,
        ))  # fmt: skip
    stored, expected = memory.flatten(0, 1)[slots, :row].view(cache_dtype), plain.flatten(0, 1)[slots]
    got, expected = (
        decode_parts(rows, (rank, size), torch.float32)
        for rows in (stored, in_rows(expected, (rank, size), cache_dtype))
    )
    assert got.isfinite().all()
    sizes = (rank, size) if size else (rank,)
    for part, own in zip(got.split(sizes, dim=1), expected.split(sizes, dim=1), strict=True):
        step = own.abs().amax(dim=-1, keepdim=True) * max(STEPS[cache_dtype], 1e-3)
        assert ((part - own).abs() <= 1.001 * step).all()
    assert (got == expected).float().mean() > 0.95
    assert not memory.flatten(0, 1)[[1, 2, 3, 4, 5, 6, 8, 9, 10]].any()
    assert not memory[..., row:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_cosines_nothing_is_rotated(ops: Backend, dtype: torch.dtype) -> None:
    q, latent, cache = torch.randn(3, 2, 12).to(dtype), torch.randn(3, 20).to(dtype), torch.zeros(1, 4, 20, dtype=dtype)
    nothing, norm = torch.empty(1, 1, 0, dtype=dtype), (torch.ones(8, dtype=dtype), NORM_EPS)
    slots = torch.tensor([2, 0, 3])
    same = ops.latent.rotate_and_store_latent(
        NewLatents(q, latent, norm, nothing, nothing, cache, slots, is_interleaved=False)
    )
    assert torch.equal(same, q)
    assert torch.equal(cache[0, slots, 8:], latent[:, 8:])


def test_stored_numbers_are_finite(ops: Backend) -> None:
    latent = torch.full((2, 12), torch.nan)
    latent[1] = torch.inf
    cache = torch.zeros(1, 4, 12)
    cos, sin = torch.ones(2, 2, 1, 4)
    ops.latent.rotate_and_store_latent(NewLatents(
        torch.zeros(2, 1, 4), latent, (torch.ones(8), NORM_EPS), cos, sin, cache, torch.tensor([0, 1]),
        is_interleaved=True,
    ))  # fmt: skip
    assert cache.isfinite().all()


def test_a_recording_follows_lengths_and_pages(own_native: NativeBackend) -> None:
    step = Step(own_native, [(1, 20), (1, 33), (1, 9)])
    weight = torch.randn(4, 24, 18)

    def run() -> Tensor:
        return own_native.latent.head_linear(step.run(), weight)

    with torch.inference_mode():
        result, recording = own_native.record(run)
        assert recording is not None
        step.seq_lens[:] = [7, 12, 3]
        step.tables[:, 0] = step.tables[[2, 0, 1], 0]
        recording.run()
        assert torch.equal(result, run())


class Sparse(Step):
    """Like `Step`, with an index key of each token behind its latent, and index queries of each new token."""

    def __init__(self, ops: Backend, rows: list[tuple[int, int]], *, size: int = 20, **options: Any) -> None:
        rank, rotary_dim = options.pop("rank", 24), options.pop("rotary_dim", 12)
        super().__init__(ops, rows, rank=rank, rotary_dim=rotary_dim, more=(size,), **options)
        latent_row = sum(row_size(each, self.cache.dtype) for each in (rank, rotary_dim))
        self.latent_cache, self.key_cache = self.cache.tensor_split((latent_row,), dim=-1)
        self.cache = self.latent_cache
        random = torch.Generator().manual_seed(1)
        self.index_q = torch.randn(len(self.q), 5, size, generator=random).to(self.q.dtype)
        self.index_weights = torch.randn(len(self.q), 9, generator=random).to(self.q.dtype)[:, 2:7]
        self.index_scale = size**-0.5

    def select(self, top_k: int) -> Selection:
        return self.ops.latent.select_tokens(
            self.index_q, self.index_weights, self.key_cache, self.batch(), top_k=top_k, scale=self.index_scale
        )

    def attend(self, selection: Selection) -> Tensor:
        return self.ops.latent.latent_attention(
            self.q, self.q_rotated, self.latent_cache, self.batch(), scale=self.scale, selection=selection
        )

    def chosen(self, top_k: int) -> list[list[int]]:
        """The positions that each token sees, in order."""
        result, token = [], 0
        for query_len, seq_len, latents in zip(self.query_lens, self.seq_lens, self.latents, strict=True):
            keys = latents[:, -self.index_q.shape[2] :].double()
            for position in range(seq_len - query_len, seq_len):
                products = (self.index_q[token].double() @ keys[: position + 1].T * self.index_scale).relu()
                scores = self.index_weights[token].double() @ products
                result.append(sorted(scores.sort(descending=True, stable=True).indices[:top_k].tolist()))
                token += 1
        return result

    def attended(self, chosen: list[list[int]]) -> Tensor:
        """The attention of each token to the positions of its list."""
        size = self.rank + self.q_rotated.shape[2]
        rows = np.repeat(np.arange(len(self.query_lens)), self.query_lens)
        queries, results = torch.cat((self.q, self.q_rotated), dim=-1).double(), []
        for query, row, positions in zip(queries, rows, chosen, strict=True):
            keys = self.latents[row][positions, :size].double()
            results.append((query @ keys.T * self.scale).softmax(dim=-1) @ keys[:, : self.rank])
        return torch.stack(results)


def positions_of(step: Sparse, selection: Selection) -> list[list[int]]:
    """The positions that a selection names, in the order of its slots."""
    rows = np.repeat(np.arange(len(step.query_lens)), step.query_lens)
    result = []
    for row, slots, count in zip(rows, selection.slots.tolist(), selection.counts.tolist(), strict=True):
        pages = {int(page): index for index, page in enumerate(step.tables[row])}
        result.append([pages[s // step.block_size] * step.block_size + s % step.block_size for s in slots[:count]])
    return result


@pytest.mark.parametrize(("top_k", "block_size"), [(7, 16), (64, 5), (500, 32)])
def test_a_token_sees_the_tokens_of_the_highest_scores(ops: Backend, top_k: int, block_size: int) -> None:
    step = Sparse(ops, MIXED, block_size=block_size)
    selection = step.select(top_k)
    expected = step.chosen(top_k)
    assert positions_of(step, selection) == expected
    torch.testing.assert_close(step.attend(selection).double(), step.attended(expected), atol=2e-5, rtol=1e-4)


def test_of_equal_scores_the_earlier_token_is_seen(ops: Backend) -> None:
    step = Sparse(ops, [(3, 30)])
    step.index_q.zero_()
    assert positions_of(step, step.select(4)) == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("cache_dtype", CODES)
def test_sparse_attention_to_codes(ops: Backend, cache_dtype: torch.dtype) -> None:
    step = Sparse(ops, MIXED, cache_dtype=cache_dtype)
    selection = step.select(64)
    expected = step.chosen(64)
    same = [got == own for got, own in zip(positions_of(step, selection), expected, strict=True)]
    assert sum(same) >= len(same) - 1  # codes of four bits have equal scores, but for rounding
    is_same = torch.tensor(same)
    out, own = step.attend(selection).double(), step.attended(expected)
    torch.testing.assert_close(out[is_same], own[is_same], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cache_dtype", CODES)
def test_the_kernels_take_codes(
    native: NativeBackend, cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch has no part in it."""
    step = Sparse(native, [(1, 20), (3, 33)], cache_dtype=cache_dtype)
    for name in [name for name in vars(EagerLatent) if not name.startswith("_")]:
        monkeypatch.setattr(EagerLatent, name, None)
    norm, nothing = (torch.ones(24), NORM_EPS), torch.empty(1, 1, 0)
    native.latent.rotate_and_store_latent(NewLatents(
        step.q_rotated, torch.randn(4, 36), norm, nothing, nothing, step.latent_cache, step.slots, is_interleaved=False
    ))  # fmt: skip
    native.latent.store_rows(step.index_q[:, 0], step.key_cache, step.slots)
    assert step.attend(step.select(9)).isfinite().all()
    assert step.run_partly()[0].isfinite().all()


@pytest.mark.parametrize("cache_dtype", [*CODES, None])
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_another_kind_of_layer_left_behind_does_no_harm(
    ops: Backend, cache_dtype: torch.dtype | None, garbage: int | None, dtype: torch.dtype
) -> None:
    """Plain torch reads masked positions, too."""
    results = []
    for each in (garbage, 0):
        step = Sparse(ops, [(1, 37), (5, 40)], dtype=dtype, cache_dtype=cache_dtype, garbage=each)
        selection = step.select(9)
        past = torch.from_numpy(step.tables[:, 2:3] * 16 + 15).repeat_interleave(torch.tensor([1, 5]), dim=0)
        padded = Selection(torch.cat((selection.slots, past.int()), dim=1), selection.counts)
        results.append((*step.run_partly(), *selection, step.attend(padded)))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("cache_dtype", [*CODES, torch.bfloat16])
def test_what_is_decoded_at_once_stays_within_the_workspace(
    cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Sparse(EagerBackend(PlainLinear()), [(2, 30)] * 24, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    limit = 6 * 16 * 36 * 4  # bytes of six pages in float32
    monkeypatch.setattr(attention_plan, "WORKSPACE_BYTES", limit)
    sizes = note_decoded(monkeypatch, cache_dtype)
    step.run()
    selection = step.select(7)
    step.attend(selection)
    rows = CacheRows(step.key_cache, selection.slots, selection.counts)
    step.ops.latent.best_rows(step.index_q, step.index_weights, rows, top_k=3, scale=1.0)
    step.ops.latent.attend_rows(step.index_q, [rows], torch.zeros(5), scale=1.0)
    assert limit / 2 < max(sizes) <= limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sparse_attention_in_half_precision(ops: Backend, dtype: torch.dtype) -> None:
    step = Sparse(ops, MIXED, dtype=dtype)
    selection = step.select(9)
    expected = step.attended(positions_of(step, selection))
    torch.testing.assert_close(step.attend(selection).double(), expected, atol=3e-2, rtol=3e-2)


def test_a_selection_does_not_depend_on_its_batch(own_native: NativeBackend) -> None:
    """Nor on the number of threads; one of all tokens gives what attention without one does, to the bit."""
    step = Sparse(own_native, [*MIXED, (2, 700)])
    together, out = step.select(33), step.attend(step.select(33))
    torch.set_num_threads(3)
    try:
        assert all(torch.equal(x, y) for x, y in zip(step.select(33), together, strict=True))
        assert torch.equal(step.attend(together), out)
    finally:
        torch.set_num_threads(1)
    last = len(step.q) - 1
    step.tables, step.query_lens, step.seq_lens = step.tables[-1:], np.array([1]), step.seq_lens[-1:]
    step.index_q, step.index_weights = step.index_q[last:], step.index_weights[last:]
    step.q, step.q_rotated, step.slots = step.q[last:], step.q_rotated[last:], step.slots[last:]
    alone = step.select(33)
    assert torch.equal(alone.slots[0], together.slots[last])
    assert torch.equal(step.attend(alone)[0], out[last])
    whole = own_native.latent.latent_attention(
        step.q, step.q_rotated, step.latent_cache, step.batch(), scale=step.scale
    )  # fmt: skip
    assert torch.equal(step.attend(step.select(800)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_stored_as_finite_numbers(ops: Backend, dtype: torch.dtype) -> None:
    x = torch.randn(3, 30).to(dtype)[:, 7:]
    x[1, 4], x[2, 0] = torch.nan, -torch.inf
    cache = torch.zeros(2, 4, 40, dtype=dtype)[..., 9:32]
    ops.latent.store_rows(x, cache, torch.tensor([6, 0, 3]))
    stored = cache.flatten(0, 1)[[6, 0, 3]]
    assert stored.isfinite().all()
    assert stored[1, 4] == 0
    assert stored[2, 0] < -1e4
    assert torch.equal(stored[x.isfinite()], x[x.isfinite()])
    assert cache.count_nonzero() == stored.count_nonzero()


@pytest.mark.parametrize("cache_dtype", CODES)
def test_rows_are_stored_as_codes(ops: Backend, cache_dtype: torch.dtype) -> None:
    x, slots = torch.randn(3, 22), torch.tensor([6, 0, 3])
    x[1, 4] = torch.nan
    memory = torch.zeros(2, 4, 3 + row_size(22, cache_dtype), dtype=torch.uint8)
    ops.latent.store_rows(x, memory.view(cache_dtype)[..., 3:], slots)
    expected = in_rows(x.nan_to_num(0.0), (22,), cache_dtype)
    got, own = (decode_parts(rows, (22,), torch.float32) for rows in (
        memory.flatten(0, 1)[slots, 3:].view(cache_dtype), expected
    ))  # fmt: skip
    torch.testing.assert_close(got, own, atol=float(STEPS[cache_dtype] * own.abs().max() * 1.001), rtol=0)
    assert (got == own).float().mean() > 0.95
    assert not memory[..., :3].any()
    assert not memory.flatten(0, 1)[[1, 2, 4, 5, 7]].any()


def test_a_recorded_selection_follows_lengths_and_keys(own_native: NativeBackend) -> None:
    step = Sparse(own_native, [(1, 20), (1, 33), (1, 9)])
    batch = step.batch()

    def run() -> Tensor:
        own_native.latent.store_rows(step.index_q[:, 0], step.key_cache, step.slots)
        selection = own_native.latent.select_tokens(
            step.index_q, step.index_weights, step.key_cache, batch, top_k=8, scale=step.index_scale
        )
        return own_native.latent.latent_attention(
            step.q, step.q_rotated, step.latent_cache, batch, scale=step.scale, selection=selection
        )

    with torch.inference_mode():
        result, recording = own_native.record(run)
        assert recording is not None
        step.seq_lens[:] = [7, 12, 3]
        step.index_q.copy_(step.index_q.flip(0))
        recording.run()
        assert torch.equal(result, run())
