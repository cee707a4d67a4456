"""The likeliest tokens of rows with ties."""

import pytest
import torch

from quire.executor.sampling.likeliest import likeliest
from quire.ops.eager.token_order import ordered_keys

torch.set_num_threads(1)


def expected(row: list[float], count: int) -> list[int]:
    """By Python's own sort, which is stable."""
    return sorted(range(len(row)), key=lambda token_id: -row[token_id])[:count]


@pytest.mark.parametrize("count", [0, 1, 5, 64, 1000])
def test_equally_likely_tokens_come_by_their_ids(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-3, 3, (4, 1000), generator=generator) / 4
    values[1] = torch.randn(1000, generator=generator)
    values[2, 7:] = -torch.inf
    values[3, ::2] *= -0.0
    found, ids = likeliest(values, count)
    assert ids.tolist() == [expected(row, count) for row in values.tolist()]
    assert torch.equal(found, values.gather(1, ids))


def test_keys_are_in_the_order_of_any_floats() -> None:
    row = [0.0, -0.0, 1e-45, -1e-45, 3.5, -3.5, torch.inf, -torch.inf, 3.4e38, -3.4e38, 3.5]
    keys = ordered_keys(torch.tensor([row]))[0]
    assert keys.argsort(descending=True).tolist() == expected(row, len(row))
    assert len(set(keys.tolist())) == len(row)


def test_a_longer_list_begins_with_a_shorter_one() -> None:
    values = torch.zeros(2, 500)
    values[1, 400:] = 1
    assert likeliest(values, 100)[1][:, :3].tolist() == likeliest(values, 3)[1].tolist() == [[0, 1, 2], [400, 401, 402]]
