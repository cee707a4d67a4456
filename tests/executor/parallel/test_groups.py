"""Collectives between real processes over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.core.errors import ConfigError
from quire.executor.parallel.groups import ParallelGroup

# One rank: prints digests of an all_reduce for each dtype and shape, and of gathers along both dimensions.
RANK = """
import hashlib, json, sys
import torch
from quire.executor.parallel.groups import ParallelGroup

torch.set_num_threads(1)
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
group = ParallelGroup.create(rank, size, "cpu", f"file://{folder}/rendezvous")
assert (group.rank, group.size) == (rank, size)

def of(rank, dtype, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)

def digest(x):
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

report = []
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)):
    for shape in ((1,), (3, 7), (5, 1000)):
        total = group.all_reduce(of(rank, dtype, shape))
        exact = sum(of(other, dtype, shape).double() for other in range(size))
        assert total.dtype == dtype and (total.double() - exact).abs().max() < tolerance, (dtype, shape)
        again = group.all_reduce(of(rank, dtype, shape))
        assert torch.equal(again, total)
        for dim in (-1, 0):
            gathered = group.all_gather(of(rank, dtype, shape), dim)
            assert torch.equal(gathered, torch.cat([of(other, dtype, shape) for other in range(size)], dim))
            report.append(digest(gathered))
        report.append(digest(total))
assert group.all_gather(torch.full((2, 3), rank)).shape == (2, 3 * size)
print(json.dumps(report))
group.close()
group.close()
"""


def test_ranks_agree_to_the_bit(tmp_path: Path) -> None:
    size = 3  # with two ranks the order of addition could not show
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    reports = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    assert len(reports[0]) == 27
    assert all(report == reports[0] for report in reports)


def test_group_of_one_is_the_identity_and_needs_no_torch_distributed() -> None:
    group = ParallelGroup.create(0, 1, "cpu", "")
    x = torch.arange(6.0).view(2, 3)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    group.close()


def test_too_few_devices_are_named(tmp_path: Path) -> None:
    size = torch.cuda.device_count() + 2
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} needs {size} CUDA devices"):
        ParallelGroup.create(0, size, "cuda", f"file://{tmp_path}/rendezvous")
