"""The tokens that stay are those of plain torch, in every row."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.ops.eager.sampling import EagerSampling
from quire.ops.triton import likely_tokens
from quire.ops.triton.sampling import TritonSampling
from tests.ops.triton.conftest import DEVICE

EAGER, TRITON = EagerSampling(), TritonSampling()
KERNELS = {
    "keep_min_p": likely_tokens.keep_min_p_rows,
    "keep_top_k": likely_tokens.keep_top_k_rows,
    "keep_top_p": likely_tokens.keep_top_p_rows,
}


def random(num_rows: int, size: int, scale: float = 3.0) -> Tensor:
    return (torch.randn(num_rows, size) * scale).to(DEVICE)


def assert_same_tokens_stay(name: str, logits: Tensor, values: np.ndarray) -> None:
    expected = getattr(EAGER, name)(logits.clone(), values)
    assert likely_tokens.keep(KERNELS[name], logits, values)
    assert torch.equal(logits.nan_to_num(7.5), expected.nan_to_num(7.5))


@pytest.mark.parametrize("size", [8, 520, 5000])
def test_top_k(size: int) -> None:
    values = np.array([1, 2, 5, size // 2, size - 1, size])
    assert_same_tokens_stay("keep_top_k", random(6, size), values)
    assert_same_tokens_stay("keep_top_k", random(6, size).bfloat16().float(), values)  # many are equal


@pytest.mark.parametrize("size", [8, 520, 5000])
def test_top_p(size: int) -> None:
    values = np.array([1e-9, 0.0, 0.1, 0.5, 0.9, 0.99, 0.999])
    assert_same_tokens_stay("keep_top_p", random(7, size), values)
    assert_same_tokens_stay("keep_top_p", random(7, size).bfloat16().float(), values)
    assert_same_tokens_stay("keep_top_p", random(7, size, 0.01).half().float(), values)


@pytest.mark.parametrize("size", [8, 520, 5000])
def test_min_p(size: int) -> None:
    values = np.log(np.array([1e-9, 0.01, 0.3, 1.0], np.float32))
    assert_same_tokens_stay("keep_min_p", random(4, size), values)


@pytest.mark.parametrize("name", KERNELS)
def test_equal_and_forbidden_tokens(name: str) -> None:
    logits = random(6, 64)
    logits[0] = 1.0  # all are equal
    logits[1, 5:] = -torch.inf  # fewer tokens than k
    logits[2, 1:] = -torch.inf
    logits[3, ::2] = -torch.inf
    logits[4] = torch.tensor([0.0, -0.0] * 32)  # which are equal, too
    logits[5, 3:20] = 9.0
    values = {
        "keep_min_p": np.full(6, np.log(0.5), np.float32),
        "keep_top_k": np.array([3, 9, 9, 9, 1, 4]),
        "keep_top_p": np.array([0.3, 0.999999, 0.5, 0.7, 0.01, 0.6]),
    }
    assert_same_tokens_stay(name, logits, values[name])


@pytest.mark.parametrize("name", KERNELS)
def test_unusable_rows_stay_so(name: str) -> None:
    logits = random(4, 64)
    logits[0, 3], logits[1, 60], logits[2] = torch.nan, torch.inf, -torch.inf
    values = {
        "keep_min_p": np.full(4, -1.0, np.float32), "keep_top_k": np.full(4, 3), "keep_top_p": np.full(4, 0.5)
    }  # fmt: skip
    assert likely_tokens.keep(KERNELS[name], logits, values[name])
    assert TRITON.draw(logits, np.zeros(4, np.uint64), np.arange(4))[1].tolist() == [False, False, False, True]


@pytest.mark.parametrize(("name", "value"), [("keep_top_k", np.array([50])), ("keep_top_p", np.array([0.95]))])
def test_a_whole_vocabulary(name: str, value: np.ndarray) -> None:
    logits = (random(1, 151_936) * 2).bfloat16().float().div_(0.7)
    assert_same_tokens_stay(name, logits, value)


def test_rows_that_torch_takes() -> None:
    logits = random(2, 37)
    expected = EAGER.keep_top_k(logits.clone(), np.array([2, 5]))
    assert torch.equal(TRITON.keep_top_k(logits, np.array([2, 5])), expected)
    assert expected.isfinite().sum(-1).tolist() == [2, 5]
