"""Random weights: the same on any number of ranks."""

import pytest
import torch

from quire.core.config.load import LoadConfig
from quire.executor.weights.dummy import DummyWeights
from quire.executor.weights.readers import Shard
from tests.checkpoints import FAMILIES, Family
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, read_spec


def test_they_are_seeded_and_slice_alike() -> None:
    shape = (1500, 1100)  # more than one period of the random block
    whole = DummyWeights(torch.float32, 1).read("a.weight", shape)
    again = DummyWeights(torch.float32, 1)
    assert torch.equal(again.read("a.weight", shape, Shard(0, 1200, 1500)), whole[1200:])
    assert torch.equal(again.read("a.weight", shape, Shard(1, 7, 500)), whole[:, 7:500])
    assert not torch.equal(again.read("b.weight", shape), whole)
    assert not torch.equal(DummyWeights(torch.float32, 2).read("a.weight", shape), whole)
    assert whole.std() == pytest.approx(shape[1] ** -0.5, rel=0.01)
    assert torch.equal(again.read("input_layernorm.weight", (5,)), torch.ones(5))
    assert torch.equal(again.read("q_proj.bias", (5,), Shard(0, 2, 4)), torch.zeros(2))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_tensors_of_three_dimensions_slice_alike(dim: int) -> None:
    weights, shape = DummyWeights(torch.float32, 3), (4, 600, 700)  # more than one period of the random block
    whole = weights.read("experts.weight", shape)
    part = weights.read("experts.weight", shape, Shard(dim, 1, 3))
    assert torch.equal(part, whole.narrow(dim, 1, 2))
    assert not torch.equal(whole[0], whole[1])
    assert whole.std() == pytest.approx(700**-0.5, rel=0.01)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "h.3.ln_1.weight"])
def test_norms_are_ones(name: str) -> None:
    weights = DummyWeights(torch.float32, 0)
    assert torch.equal(weights.read(name, (5,)), torch.ones(5))
    assert torch.equal(weights.read(name.replace("weight", "bias"), (5,)), torch.zeros(5))


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_on_them(family: Family, checkpoint: Checkpoints) -> None:
    model = load_model(read_spec(checkpoint(family)), load=LoadConfig(load_format="dummy"))
    logits = PagedDriver(model, 1, 64).step({0: list(range(20))})[0]
    assert torch.isfinite(logits).all()
    assert logits.std() > 0
