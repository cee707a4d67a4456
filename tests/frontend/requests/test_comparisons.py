"""Scores by vectors are those of torch's functions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quire.frontend.requests.comparisons import cosine, late_interaction


def test_the_cosine_of_vectors() -> None:
    first, second = torch.randn(2, 300)
    expected = float(F.cosine_similarity(first, second, dim=0))
    assert cosine(first.numpy(), second.numpy()) == pytest.approx(expected, abs=1e-6)
    assert cosine(np.zeros(3, np.float32), np.ones(3, np.float32)) == 0.0


def test_late_interaction_adds_the_largest_products_of_the_querys_tokens() -> None:
    query, document = torch.randn(7, 16), torch.randn(12, 16)
    expected = float((query @ document.T).amax(1).sum())
    assert late_interaction(query.numpy(), document.numpy()) == pytest.approx(expected, rel=1e-6)
    assert late_interaction(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[2.0, 3.0], [5.0, -1.0]])) == 8.0
