"""DeepSeek V4 beyond the comparison with Transformers, which `test_coverage.py` makes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.core.wire.rank import Rank
from quire.executor.models.base import Model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from tests.executor.layers.test_layers import on_every_rank
from tests.executor.models.test_models import prompts
from tests.executor.models.tiny_models import VOCAB_SIZE, write_checkpoint
from tests.executor.paged_driver import PagedDriver, load_model, read_spec
from tests.executor.step.test_model_runner import engine_config

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek_v4")
    write_checkpoint(path, "deepseek_v4")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(read_spec(folder))


def test_tokens_do_not_depend_on_the_batch(model: Model) -> None:
    many = prompts(9, VOCAB_SIZE)
    together = PagedDriver(model, len(many), 128).greedy(many, 20)
    for row in (0, 7):
        assert PagedDriver(model, 1, 128).greedy([many[row]], 20)[0] == together[row]


def test_last_tokens_alone_are_those_of_the_whole(model: Model) -> None:
    whole, last = PagedDriver(model, 5, 128), PagedDriver(model, 5, 128)
    some = dict(enumerate(prompts(4, VOCAB_SIZE)))
    for feed in (some, {4: [3, 4, 5], 1: [6], 0: [7, 8]}, {row: [9] for row in range(5)}):
        expected, got = whole.step(feed), last.step(feed, only_last=True)
        for row in feed:
            torch.testing.assert_close(got[row], expected[row][-1:], atol=1e-4, rtol=0)


def test_ranks_together_are_the_whole_model(folder: Path) -> None:
    """Each rank has whole groups of heads, and all rows."""
    some = dict(enumerate(prompts(3, VOCAB_SIZE)))

    def run(group: ParallelGroup) -> list[Tensor]:
        driver = PagedDriver(load_model(read_spec(folder), group=group), 3, 80)
        return [*driver.step(some).values(), *driver.step({0: [3], 1: [4], 2: [9]}).values()]

    whole = run(ParallelGroup())
    for of_rank in on_every_rank(2, run):
        for got, expected in zip(of_rank, whole, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_only_rows_grow_with_a_sequence(folder: Path) -> None:
    """A row of 4 tokens is made of 8, one of 8 of as many, and a token sees the latest 24."""
    ready = Worker(engine_config(folder), Rank(), ParallelGroup()).load()
    layers = {
        group.window: sum(len(each.layers) for each in ready.kv_groups if each.window == group.window)
        for group in ready.kv_groups
    }
    assert layers == {None: 3, 8: 3, 24: 4}


def test_rows_do_not_cross_pages(folder: Path) -> None:
    """Pages of 6 tokens would begin inside of rows."""
    with pytest.raises(ModelLoadError, match="--block-size 6: the model keeps one row for 8 tokens"):
        PagedDriver(load_model(read_spec(folder)), 1, 30, block_size=6)


def test_layers_that_hash_tokens_stay_in_the_first_stage(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="first pipeline stage; give it 3 layers"):
        load_model(read_spec(folder, mlp_layer_types=["hash_moe"] * 3 + ["moe"]), layers=range(2, 4))
