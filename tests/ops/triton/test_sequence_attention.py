"""Attention in both directions within sequences, against plain torch."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.ops.backend import AttentionForm, PairBias
from quire.ops.triton.backend import TritonBackend
from tests.ops.triton.conftest import DEVICE
from tests.ops.triton.paged import EAGER

LENGTHS = np.array([5, 1, 40])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE)


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("form", [{}, {"window": 7}, {"distance_bias": 9}], ids=str)
def test_forms(form: dict[str, Any], is_rotated: bool) -> None:
    ops, heads = TritonBackend(), random(46, 4, 32)
    if "distance_bias" in form:
        form = {"distance_bias": random(2, 2 * form["distance_bias"] + 1)}
    cos, sin = EAGER.rotation(
        torch.arange(46, device=DEVICE), torch.logspace(0, -3, 16, device=DEVICE), 1.0, heads.dtype
    )
    options: dict[str, Any] = {"rotation": (cos, sin)} if is_rotated else {}
    wanted = AttentionForm(0.2, **form)
    batch = ops.sequence_batch(LENGTHS, heads.device)
    got = ops.sequence_attention(heads, 1, batch, wanted, **options)
    expected = EAGER.sequence_attention(heads, 1, EAGER.sequence_batch(LENGTHS, heads.device), wanted, **options)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    pages = heads[:, 2:].unflatten(1, (2, 1)).unsqueeze(3)
    assert ops._attend(heads[:, :2], pages, batch, wanted) is not None, "a kernel computes it"


def test_biases_of_pairs_are_left_to_plain_torch() -> None:
    ops, heads = TritonBackend(), random(46, 6, 32)
    buckets = torch.randint(0, 5, (2, 2 * 39 + 1), device=DEVICE)
    form = AttentionForm(0.2, pair_bias=PairBias(random(46, 2, 5), random(46, 2, 5), *buckets))
    got = ops.sequence_attention(heads, 2, ops.sequence_batch(LENGTHS, heads.device), form)
    expected = EAGER.sequence_attention(heads, 2, EAGER.sequence_batch(LENGTHS, heads.device), form)
    torch.testing.assert_close(got, expected)
