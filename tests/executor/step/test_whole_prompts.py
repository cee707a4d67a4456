"""A model whose prompts see all of themselves: company, preemption, a crash and ranks do not show in its tokens."""

from pathlib import Path

import pytest
import torch

from tests.core.scheduling.fake_worker import resumed_after
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.step.test_model_runner import prompt_of, request, tokens_of
from tests.executor.step.test_sameness import Served, alone, start
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

REQUESTS = [
    request(f"r{i}", prompt_of(i % 5, size), max_tokens=30, temperature=0.0 if i % 2 else 0.9, seed=i)
    for i, size in enumerate((1, 40, 9, 90, 2, 33, 64, 17))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpmant")
    write_checkpoint(folder, "cpmant")
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return start(folder)


@pytest.fixture(scope="module")
def expected(served: Served) -> dict[str, list[int]]:
    return alone(served, REQUESTS)


def test_tokens_do_not_depend_on_company_or_preemption(served: Served, expected: dict[str, list[int]]) -> None:
    assert len({tuple(row) for row in expected.values()}) == len(expected), "outputs must differ to prove anything"
    for options in [
        {"depth": 3},
        {"max_num_seqs": 3, "max_num_batched_tokens": 90},
        {"long_prefill_token_threshold": 95, "depth": 3},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
    ]:
        assert tokens_of(served.generate(REQUESTS, **options)) == expected, options
    preempted = served.generate(REQUESTS, num_pages=45, depth=3)
    assert tokens_of(preempted) == expected
    assert sum(deltas[-1].num_preemptions for deltas in preempted.values()) > 3


def test_requests_that_resume_after_a_crash_go_on_as_before(served: Served, expected: dict[str, list[int]]) -> None:
    resumed = [resumed_after(expected[f"r{i}"][: 3 * i], each) for i, each in enumerate(REQUESTS)]
    for options in ({}, {"max_num_batched_tokens": 92}):
        got = tokens_of(served.generate(resumed, **options))
        assert [got[f"r{i}"] for i in range(8)] == [expected[f"r{i}"][3 * i :] for i in range(8)]


def test_ranks_with_parts_of_the_heads_compute_the_same(folder: Path, expected: dict[str, list[int]]) -> None:
    for tokens in on_every_rank(2, lambda group: tokens_of(start(folder, group).generate(REQUESTS[:4]))):
        assert tokens == {name: expected[name] for name in tokens}
