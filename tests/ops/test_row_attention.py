"""The operations of attention to chosen rows of caches (compressed attention) against their formulas in float64."""

import pytest
import torch
from torch import Tensor

from quire.ops.backend import Backend
from quire.ops.cache_rows import LARGEST_CODE, decode, encode, gather
from quire.ops.cpu.native import NativeBackend
from quire.ops.eager.latent import EagerLatent
from quire.ops.latent import CacheRows

torch.set_num_threads(1)

COUNTS = [0, 1, 64, 17, 150, 5, 63, 0, 65]


def rows_of(counts: list[int], size: int, *, block_size: int = 5, seed: int = 0, dtype: torch.dtype) -> CacheRows:
    """Rows in any order, in pages that lie apart; what no token sees is NaN."""
    random = torch.Generator().manual_seed(seed)
    most = max(*counts, 1)
    num_pages = -(-2 * most // block_size)
    memory = torch.randn(num_pages, block_size + 1, size + 3, generator=random)
    seen = torch.stack([torch.randperm(num_pages * block_size - 1, generator=random)[:most] + 1 for _ in counts])
    for row, count in enumerate(counts):
        seen[row, count:] = 0
    if dtype in LARGEST_CODE:
        cache = encode(memory[:, :block_size, :size], dtype)
    else:
        memory[:, block_size:], memory[..., size:], memory[0, 0] = torch.nan, torch.nan, torch.nan
        cache = memory.to(dtype)[:, :block_size, :size]
    return CacheRows(cache, seen.int(), torch.tensor(counts))


def keys_of(rows: CacheRows, token: int) -> Tensor:
    """[counts[token], size] float64."""
    slots = rows.slots[token, : rows.counts[token]].long()
    return decode(gather(rows.cache, slots), torch.float32).double()


def some(rows: CacheRows, tokens: slice) -> CacheRows:
    return CacheRows(rows.cache, rows.slots[tokens], rows.counts[tokens])


def attended(q: Tensor, rows: list[CacheRows], sinks: Tensor, scale: float) -> Tensor:
    results = []
    for token in range(len(q)):
        keys = torch.cat([keys_of(each, token) for each in rows])
        scores = torch.cat((q[token].double() @ keys.T * scale, sinks.double().unsqueeze(1)), dim=1)
        results.append(scores.softmax(dim=1)[:, :-1] @ keys)
    return torch.stack(results)


def chosen(q: Tensor, weights: Tensor, rows: CacheRows, top_k: int, scale: float) -> list[list[int]]:
    """The slots that each token sees, in their order."""
    results = []
    for token in range(len(q)):
        keys = keys_of(rows, token)
        scores = weights[token].double() @ (q[token].double() @ keys.T * scale).relu()
        best = scores.sort(descending=True, stable=True).indices[:top_k].sort().values
        results.append(rows.slots[token][best].tolist())
    return results


@pytest.mark.parametrize(
    ("heads", "size", "dtype"),
    [(4, 24, torch.float32), (1, 33, torch.float32), (40, 64, torch.float32), (7, 128, torch.bfloat16),
     (4, 20, torch.float16)],
)  # fmt: skip
def test_attention_to_rows(ops: Backend, heads: int, size: int, dtype: torch.dtype) -> None:
    """Of one cache and of two; a token that sees none has zeros."""
    random = torch.Generator().manual_seed(1)
    q = torch.randn(heads, len(COUNTS), size + 2, generator=random).to(dtype).transpose(0, 1)[..., :size]
    sinks = torch.randn(heads, generator=random)
    sinks[0] = 60.0 if heads > 1 else -30.0
    first = rows_of(COUNTS, size, dtype=dtype)
    second = rows_of([0, 70, 3, 0, 1, 128, 9, 2, 64], size, block_size=16, seed=2, dtype=dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    for rows in ([first], [first, second]):
        out = ops.latent.attend_rows(q, rows, sinks, scale=size**-0.5)
        assert out.dtype == dtype
        torch.testing.assert_close(
            out.double(), attended(q, rows, sinks, size**-0.5), atol=tolerance, rtol=tolerance
        )  # fmt: skip
    assert out[0].count_nonzero() == 0


@pytest.mark.parametrize(("heads", "size", "top_k"), [(5, 20, 7), (64, 32, 64), (1, 9, 149), (3, 16, 500)])
def test_rows_of_the_highest_scores(ops: Backend, heads: int, size: int, top_k: int) -> None:
    random = torch.Generator().manual_seed(1)
    q = torch.randn(len(COUNTS), heads, size, generator=random)
    weights = torch.randn(len(COUNTS), heads + 4, generator=random)[:, 2:-2]
    rows = rows_of(COUNTS, size, dtype=torch.float32)
    found = ops.latent.select_rows(q, weights, rows, top_k=top_k, scale=size**-0.5)
    assert found.counts.tolist() == [min(count, top_k) for count in COUNTS]
    got = [slots[:count] for slots, count in zip(found.slots.tolist(), found.counts.tolist(), strict=True)]
    assert got == chosen(q, weights, rows, top_k, size**-0.5)
    assert ((found.slots >= 0) & (found.slots < rows.cache[..., 0].numel())).all(), "the others are places, too"


@pytest.mark.parametrize("dtype", list(LARGEST_CODE))
def test_rows_of_codes(ops: Backend, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    q, sinks = torch.randn(len(COUNTS), 4, 24, generator=random), torch.randn(4, generator=random)
    rows = rows_of(COUNTS, 24, dtype=dtype)
    out = ops.latent.attend_rows(q, [rows], sinks, scale=24**-0.5)
    torch.testing.assert_close(out.double(), attended(q, [rows], sinks, 24**-0.5), atol=2e-5, rtol=1e-4)
    found = ops.latent.select_rows(q, sinks.expand(len(q), -1), rows, top_k=7, scale=24**-0.5)
    got = [slots[:count] for slots, count in zip(found.slots.tolist(), found.counts.tolist(), strict=True)]
    assert got == chosen(q, sinks.expand(len(q), -1), rows, 7, 24**-0.5)


def test_of_equal_scores_the_earlier_row_is_chosen(ops: Backend) -> None:
    rows = rows_of([30, 3], 8, dtype=torch.float32)
    found = ops.latent.select_rows(torch.zeros(2, 3, 8), torch.ones(2, 3), rows, top_k=4, scale=1.0)
    assert torch.equal(found.slots[0], rows.slots[0, :4])
    assert torch.equal(found.slots[1, :3], rows.slots[1, :3])


def test_rows_do_not_depend_on_the_batch(own_native: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on the number of threads, to the bit. Plain torch has no part in it."""
    for name in ("best_rows", "attend_rows"):
        monkeypatch.setattr(EagerLatent, name, None)
    latent, random = own_native.latent, torch.Generator().manual_seed(1)
    q, sinks = torch.randn(len(COUNTS), 40, 64, generator=random), torch.randn(40, generator=random)
    weights = torch.randn(len(COUNTS), 40, generator=random)
    first, second = rows_of(COUNTS, 64, dtype=torch.float32), rows_of([700] * 9, 64, seed=2, dtype=torch.float32)

    def run(tokens: slice) -> tuple[Tensor, Tensor]:
        found = latent.select_rows(q[tokens], weights[tokens], some(second, tokens), top_k=300, scale=0.1)
        return found.slots, latent.attend_rows(q[tokens], [some(first, tokens), found], sinks, scale=0.1)

    slots, out = run(slice(None))
    for token in (0, 4, 8):
        alone = run(slice(token, token + 1))
        assert torch.equal(alone[0][0], slots[token])
        assert torch.equal(alone[1][0], out[token])
    torch.set_num_threads(3)
    try:
        assert all(torch.equal(x, y) for x, y in zip(run(slice(None)), (slots, out), strict=True))
    finally:
        torch.set_num_threads(1)
