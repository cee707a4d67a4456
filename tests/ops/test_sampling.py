"""Drawing, the likeliest token and masks, as operations: every backend against statistics and plain torch."""

import numpy as np
import pytest
import torch
from scipy import stats

from quire.ops.backend import Backend
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.random import start_of, uniforms, uniforms_of


def random_logits(num_rows: int, seed: int = 0, vocab_size: int = 50) -> torch.Tensor:
    return 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def test_uniforms_are_uniform_along_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(500, dtype=np.uint64), np.arange(500), indexing="ij")
    values = uniforms(start_of(seeds.ravel()), positions.ravel()).reshape(500, 500)
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-3
    for first, second in [(values[1:], values[:-1]), (values[:, 1:], values[:, :-1])]:
        pairs, _, _ = np.histogram2d(first.ravel(), second.ravel(), bins=20, range=[[0, 1], [0, 1]])
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-3
    diagonal = np.histogram2d(values[1:, :-1].ravel(), values[:-1, 1:].ravel(), bins=20)[0]
    assert stats.chisquare(diagonal.ravel()).pvalue > 1e-3


def test_uniforms_are_the_same_forever() -> None:
    """A seed must always give the same numbers: those of SplitMix64 in plain integers."""
    mask = 2**64 - 1

    def mix(z: int, a: int, m: int, b: int, n: int, c: int) -> int:
        z = ((z ^ (z >> a)) * m) & mask
        z = ((z ^ (z >> b)) * n) & mask
        return z ^ (z >> c)

    gamma = 0x9E3779B97F4A7C15
    cases = [(0, 0), (1, 5), (2**64 - 1, 131071), (42, 1)]
    for seed, position in cases:
        start = mix((seed + gamma) & mask, 33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)
        bits = mix((start + (position + 1) * gamma) & mask, 30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
        value = uniforms(start_of(np.array([seed], np.uint64)), np.array([position]))[0]
        assert value == (bits >> 11) / 2**53


def test_uniforms_on_a_device_are_the_same() -> None:
    random = np.random.default_rng(3)
    starts, positions = random.integers(0, 2**64, 2000, np.uint64), random.integers(0, 2**40, 2000)
    there = uniforms_of(torch.from_numpy(starts.view(np.int64)), torch.from_numpy(positions))
    assert there.tolist() == uniforms(starts, positions).tolist()


def drawing(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and positions for which `uniforms` gives `values` [n]: the inverse of SplitMix64."""

    def unshifted(bits: int, shift: int) -> int:
        """The z for which `bits` = z ^ (z >> shift)."""
        z = bits
        for _ in range(64 // shift):
            z = bits ^ (z >> shift)
        return z

    starts = []
    for value in values.tolist():
        z = unshifted(int(value * 2**53) << 11, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
        z = unshifted(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
        starts.append((unshifted(z, 30) - 0x9E3779B97F4A7C15) % 2**64)
    numbers = np.array(starts, np.uint64), np.zeros(len(starts), np.int64)
    assert uniforms(*numbers).tolist() == values.tolist()
    return numbers


def test_a_token_without_probability_is_never_drawn(ops: Backend) -> None:
    """Uniforms at both ends and on every boundary between tokens, over several chunks; one chunk has no probability."""
    vocab_size = 9000
    logits = torch.full((1, vocab_size), -torch.inf)
    allowed = [3, 511, 2047, 2048, 8997]
    logits[0, allowed] = torch.tensor([0.0, 1.0, -2.0, 0.5, 0.1])
    edges = np.concatenate([[0.0, 1 - 2.0**-53], logits.softmax(-1)[0, allowed].double().cumsum(0).numpy() - 1e-17])
    numbers = drawing(np.clip(edges, 0, 1 - 2.0**-53))
    token_ids, usable = ops.sampling.draw(logits.expand(len(edges), -1), *numbers)
    assert set(token_ids.tolist()) <= set(allowed)
    assert token_ids[:2].tolist() == [3, 8997]
    assert usable.all()


def test_the_draw_over_a_large_vocabulary_follows_the_distribution(ops: Backend) -> None:
    """Quantiles: the token drawn for u is the one whose cumulative probability first exceeds u."""
    vocab_size = 5000
    logits = random_logits(1, vocab_size=vocab_size)
    starts, positions = start_of(np.arange(2000, dtype=np.uint64)), np.arange(2000) % 7
    token_ids, _ = ops.sampling.draw(logits.expand(2000, -1), starts, positions)
    running = logits.double().softmax(-1)[0].cumsum(0)
    expected = torch.searchsorted(running, torch.from_numpy(uniforms(starts, positions)), right=True)
    assert (token_ids != expected).sum() <= 2, "off by rounding at a boundary at most"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 17, 512, 5003])
def test_tokens_of_a_backend_are_those_of_plain_torch(ops: Backend, dtype: torch.dtype, vocab_size: int) -> None:
    logits = random_logits(200, seed=5, vocab_size=vocab_size).to(dtype)
    logits[:, vocab_size // 2] = logits.max(-1).values  # a tie: the first wins
    numbers = start_of(np.arange(200, dtype=np.uint64)), np.arange(200)
    token_ids, usable = ops.sampling.likeliest(logits)
    assert usable.all()
    assert token_ids.tolist() == np.asarray(logits.float()).argmax(-1).tolist()
    drawn, usable = ops.sampling.draw(logits, *numbers)
    assert usable.all()
    assert (drawn != EagerBackend(PlainLinear()).sampling.draw(logits, *numbers)[0]).sum() <= 2, (
        "off by rounding at a boundary at most"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 259, 5003])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [1, 4], [3, 0], []], ids=str)
def test_a_bitmask_takes_tokens_away_from_its_rows_alone(
    ops: Backend, dtype: torch.dtype, vocab_size: int, rows: list[int]
) -> None:
    """Rows in any order, of logits in wider rows, with all, some or no tokens allowed; allowed logits do not change."""
    wide = random_logits(5, vocab_size=vocab_size + 9).to(dtype)
    wide[2:4, vocab_size // 2] = torch.tensor([torch.nan, torch.inf])
    before = wide.clone()
    allowed = np.random.default_rng(1).random((len(rows), -(-vocab_size // 32) * 32)) < 0.4
    allowed[:1], allowed[1:2] = True, False
    bitmask = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    ops.sampling.apply_bitmask(wide[:, :vocab_size], np.array(rows, np.int64), bitmask)
    expected = before.clone()
    for bits, row in zip(allowed, rows, strict=True):
        expected[row, :vocab_size][torch.from_numpy(~bits[:vocab_size])] = -torch.inf
    torch.testing.assert_close(wide, expected, rtol=0, atol=0, equal_nan=True)


def test_a_bitmask_for_a_row_that_is_not_there_is_refused(ops: Backend) -> None:
    logits = random_logits(2)
    with pytest.raises(IndexError):
        ops.sampling.apply_bitmask(logits, np.array([0, 2]), np.zeros((2, 2), np.int32))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_unusable_rows_are_told_and_harm_no_others(ops: Backend, value: float) -> None:
    logits = random_logits(4, vocab_size=5000)
    logits[1, 4600] = value
    logits[2, :4600] = -torch.inf
    logits[3, 2000:] = -torch.inf
    logits[3, 4600] = value  # where all else is -inf
    numbers = drawing(np.full(4, 0.5))
    for token_ids, usable in (ops.sampling.likeliest(logits), ops.sampling.draw(logits, *numbers)):
        assert usable.tolist() == [True, False, True, False]
        assert set(token_ids.tolist()) <= set(range(5000))
        assert token_ids[2] >= 4600


# ------------------------------------------------------------------------------------------------------ reproducibility
