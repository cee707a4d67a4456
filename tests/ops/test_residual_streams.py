"""The operations of residual streams and sparse gates against their formulas in float64."""

import pytest
import torch
from torch import Tensor

from quire.ops.backend import Backend

torch.set_num_threads(1)

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SHAPES = [(2, 2, 5), (4, 1, 16), (3, 7, 37), (4, 130, 96)]  # streams, tokens, size


def random(*shape: int, dtype: torch.dtype, seed: int = 0, gap: int = 0) -> Tensor:
    """Rows of numbers, each `gap` numbers apart from the next."""
    *rows, size = shape
    return torch.randn(*rows, size + gap, generator=torch.Generator().manual_seed(seed)).to(dtype)[..., :size]


def check(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def matched(x: Tensor, like: Tensor) -> Tensor:
    return x * (like.square().mean(-1, keepdim=True) / x.square().mean(-1, keepdim=True).clamp(min=1e-5)).sqrt()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_streams(ops: Backend, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    count, num_tokens, size = shape
    streams = random(*shape, dtype=dtype)
    x = random(num_tokens, size, dtype=dtype, seed=1, gap=3)
    wide, wider = streams.double(), x.double()

    projected = random(num_tokens, (count - 1) * size, dtype=dtype, seed=2)
    parts = projected.double().unflatten(1, (-1, size)).unbind(1)
    check(
        ops.residual_streams.expand(x, projected),
        torch.stack([wider, *(matched(part, wider) for part in parts)]),
        dtype,
    )
    check(ops.residual_streams.match_magnitude(streams[-1], x), matched(wide[-1], wider), dtype)

    table = random(num_tokens, count**2, dtype=dtype, seed=3, gap=1)
    mixed = torch.einsum("tij,jts->its", table.double().unflatten(1, (count, count)), wide)
    check(ops.residual_streams.predict(streams, table), wide + mixed, dtype)

    factors, active = table[:, :count], count - 1
    news = (1 + factors.double()).t().unsqueeze(2) * (wider - wide[active])
    check(ops.residual_streams.correct(streams, x, factors, active), wide + news, dtype)

    ops.residual_streams.add_to_others(streams, x)
    check(streams, torch.cat((wide[:1], wide[1:] + wider)), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("part", [slice(0, 37), slice(37, 64), slice(0, 64)], ids=str)
def test_outliers_are_kept_by_the_cutoff_of_the_whole(ops: Backend, part: slice, dtype: torch.dtype) -> None:
    whole = random(5, 64, dtype=dtype, gap=4) + 2
    wide = whole.double()
    cutoff = wide.mean(-1, keepdim=True) + 0.7 * wide.std(-1, keepdim=True, unbiased=False)
    expected = (wide - cutoff).relu()[:, part]
    gates = whole[:, part] if part.stop - part.start == 64 else whole[:, part].clone()
    ops.residual_streams.keep_outliers(gates, whole, 0.7)
    check(gates, expected, dtype)
    assert 0 < (gates > 0).sum() < gates.numel() / 2


def test_a_row_of_zeros_stays_zero(ops: Backend) -> None:
    zeros, like = torch.zeros(2, 9), torch.ones(2, 9)
    assert torch.equal(ops.residual_streams.match_magnitude(zeros, like), zeros)
    assert torch.equal(ops.residual_streams.match_magnitude(like, zeros), zeros)
