"""Collectives over NCCL, as far as one device goes: a group of one rank. See `scripts/gpu_check`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.executor.parallel.groups import DistributedGroup, leave

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DistributedGroup]:
    from torch import distributed

    meeting: Path = tmp_path_factory.mktemp("meeting") / "file"
    distributed.init_process_group("nccl", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield DistributedGroup(distributed, distributed.new_group([0]), 0, 1)
    leave()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_collectives_take_what_the_layers_give_them(group: DistributedGroup, dtype: torch.dtype) -> None:
    x = torch.arange(24, device="cuda").view(4, 6).to(dtype)
    assert torch.equal(group.all_reduce(x.clone()), x)
    assert torch.equal(group.all_gather(x), x)
    assert torch.equal(group.all_gather(x, 0), x)
    assert torch.equal(group.all_to_all(x[None]), x[None])
    assert all(map(torch.equal, group.all_to_all_together([x[None], x[None, :2]]), [x[None], x[None, :2]]))


def test_rows_of_experts_come_back(group: DistributedGroup) -> None:
    rows = torch.arange(40, device="cuda", dtype=torch.uint8).view(5, 8)
    came, received = group.all_to_all_rows(rows, [5], [9])
    assert received == [5]
    assert torch.equal(came, rows)
