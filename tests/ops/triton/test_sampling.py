"""Sampling by kernels equals that of plain torch, and of the CPU's kernels: equal logits give equal tokens."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops.eager.sampling import EagerSampling
from quire.ops.random import uniforms
from quire.ops.triton.sampling import TritonSampling
from tests.ops.triton.conftest import DEVICE

EAGER, TRITON = EagerSampling(), TritonSampling()
TYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [8, 520, 4104, 9000]


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "torch_takes" in request.node.name:
        return
    for name in ("apply_bitmask", "likeliest", "draw"):

        def run(self: EagerSampling, *args: object, plain=getattr(EagerSampling, name)) -> object:
            assert self is EAGER, "fell back to plain torch"
            return plain(self, *args)

        monkeypatch.setattr(EagerSampling, name, run)


def random(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(num_rows, size) * 3).to(dtype).to(DEVICE)


def seeds(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(num_rows)
    return generator.integers(0, 2**64, num_rows, np.uint64), generator.integers(0, 2**40, num_rows, np.int64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_likeliest(size: int, dtype: torch.dtype) -> None:
    logits = random(5, size, dtype)
    logits[0, [2, size - 1, size // 2]] = 50.0  # of equal ones, the first
    logits[1, 0], logits[2, size - 1] = torch.nan, torch.inf
    logits[3] = -torch.inf
    token_ids, usable = TRITON.likeliest(logits)
    expected, expected_usable = EAGER.likeliest(logits)
    assert usable.tolist() == expected_usable.tolist() == [True, False, False, False, True]
    assert (token_ids[0], token_ids[4]) == (2, expected[4])
    assert all(0 <= each < size for each in token_ids.tolist())


def test_likeliest_finds_every_nan() -> None:
    for place in (0, 1000, 4095, 4096, 8999):
        logits = random(1, 9000)
        logits[0, place] = torch.nan
        assert not TRITON.likeliest(logits)[1].any()
        assert not TRITON.draw(logits, *seeds(1))[1].any()


def test_rows_that_lie_apart() -> None:
    wide = random(3, 5000)
    logits = wide[:, 8:4200]
    assert torch.equal(TRITON.likeliest(logits)[0], logits.argmax(-1))
    assert torch.equal(TRITON.draw(logits, *seeds(3))[0], EAGER.draw(logits, *seeds(3))[0])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_draws_are_those_of_plain_torch(size: int, dtype: torch.dtype) -> None:
    logits = random(20, size, dtype)
    logits[:, 1::3] = -torch.inf
    logits[1, 8:], logits[2, :-1], logits[2, -1] = -torch.inf, -torch.inf, 1.0
    token_ids, usable = TRITON.draw(logits, *seeds(20))
    expected, _ = EAGER.draw(logits, *seeds(20))
    assert usable.all()
    assert token_ids.tolist() == expected.tolist()


def test_draws_at_both_ends() -> None:
    """A start and a position whose uniform is nearly 0 or 1: the first and the last token with a weight."""
    starts, positions = np.zeros(200_000, np.uint64), np.arange(200_000)
    values = uniforms(starts, positions)
    least, greatest = values.argmin(), values.argmax()
    logits = torch.zeros(2, 4104, device=DEVICE)
    logits[:, :3], logits[:, 4000:] = -torch.inf, -torch.inf
    token_ids, _ = TRITON.draw(logits, starts[:2], positions[[least, greatest]])
    assert token_ids.tolist() == [3, 3999]


def test_unusable_rows() -> None:
    logits = random(4, 520)
    logits[0, 3], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    token_ids, usable = TRITON.draw(logits, *seeds(4))
    assert usable.tolist() == EAGER.draw(logits, *seeds(4))[1].tolist() == [False, False, False, True]
    assert all(0 <= each < 520 for each in token_ids.tolist())


def test_a_whole_vocabulary() -> None:
    logits = random(1, 151_936, torch.bfloat16)
    assert TRITON.likeliest(logits)[0] == logits.float().argmax()
    assert TRITON.draw(logits, *seeds(1))[0] == EAGER.draw(logits, *seeds(1))[0]


def test_a_row_is_drawn_alike_in_any_company() -> None:
    logits, (starts, positions) = random(7, 520), seeds(7)
    together = TRITON.draw(logits, starts, positions)[0]
    alone = [TRITON.draw(logits[i : i + 1], starts[i : i + 1], positions[i : i + 1])[0].item() for i in range(7)]
    assert together.tolist() == alone


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_bitmasks(size: int, dtype: torch.dtype) -> None:
    rows = np.array([3, 0])
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (2, -(-size // 32)), dtype=np.int32)
    logits = random(4, size, dtype)
    logits[1, 0], logits[3, :2] = torch.nan, torch.tensor([torch.nan, torch.inf])
    expected = logits.clone()
    EAGER.apply_bitmask(expected, rows, words)
    TRITON.apply_bitmask(logits, rows, words)
    assert torch.equal(logits.nan_to_num(1e4), expected.nan_to_num(1e4))


def test_rows_that_torch_takes() -> None:
    logits = random(3, 37)
    assert torch.equal(TRITON.likeliest(logits)[0], logits.argmax(-1))
    assert torch.equal(TRITON.draw(logits, *seeds(3))[0], EAGER.draw(logits, *seeds(3))[0])
