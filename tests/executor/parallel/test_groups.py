"""Collectives between real processes over gloo."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from quire.core.errors import ConfigError
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import RankGroups, _context_groups

pytestmark = pytest.mark.turns(4, among="whole systems")

# One rank: prints digests of an all_reduce for each dtype and shape, and of gathers along both dimensions. Sums of rows
# are compared with those of more rows.
RANK = """
import hashlib, json, sys, time
from pathlib import Path
import torch, torch._dynamo  # which torch's profiler imports
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import RankGroups, leave

torch.set_num_threads(1)
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
group, stages, _ = RankGroups.join(Rank(tensor=rank), Layout(tensor=size), "cpu", f"file://{folder}/rendezvous")
assert stages is None
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
sent = 10 * rank + torch.arange(2 * size).view(2, size).T  # to each rank two numbers, not side by side
assert group.all_to_all(sent).tolist() == [[10 * other + rank, 10 * other + size + rank] for other in range(size)]
limits = [0, *[40 * other for other in range(1, size)]]  # the first rank has no rows
counts = [[min(limits[sender], 7 * other * sender) for other in range(size)] for sender in range(size)]
for width in (5, 5000):  # the second makes more bytes of some messages than a posted receive takes
    sent = torch.cat([torch.full((count, width), 10 * rank + other) for other, count in enumerate(counts[rank])])
    rows, received = group.all_to_all_rows(sent.to(torch.uint8), counts[rank], limits)
    assert received == [each[rank] for each in counts]
    assert rows.tolist() == [[10 * other + rank] * width for other, count in enumerate(received) for _ in range(count)]
    assert group.exchange_rows(rows, received, counts[rank]).tolist() == sent.tolist()
limits, counts = [0, 1, 1], [0, 0, 0] if rank == 0 else [1, 0, 0]
has_sent = [Path(folder, f"sent{other}") for other in range(size)]
deadline = time.monotonic() + 20
while rank == 0 and not all(path.exists() for path in has_sent[1:]):
    assert time.monotonic() < deadline, "small rows wait until they are asked for"
    time.sleep(0.01)
_, received = group.all_to_all_rows(torch.ones(sum(counts), 3, dtype=torch.uint8), counts, limits)
assert received == ([0, 1, 1] if rank == 0 else [0, 0, 0])
has_sent[rank].touch()
for width in (1, 50_000):  # with large tensors beside small ones, too
    for _ in range(4):  # receives are used again
        pair = of(rank, torch.bfloat16, (size, 3, width)), of(rank, torch.float32, (size, 3))
        for number, came in enumerate(group.all_to_all_together(pair)):
            shape = pair[number].shape
            assert torch.equal(came, torch.stack([of(other, came.dtype, shape)[rank] for other in range(size)]))
        assert group.all_reduce(torch.ones(1)) == size
rows = of(rank, torch.float32, (80, 1000))
totals = {number: group.all_reduce(rows[:number].clone()) for number in (80, 79, 7, 1)}
assert all(torch.equal(total, totals[80][:number]) for number, total in totals.items()), "rows depend on others"
report.append(digest(totals[80]))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recording:
    for _ in range(3):
        group.all_reduce(rows[:1].clone())
        group.all_to_all_together([rows[:size], rows[:size, 0]])
# Receives are under way when a recording ends: their ends would be written into memory that is given back.
assert "gloo:send" in (names := {event.key for event in recording.key_averages()}), names
assert "gloo:recv" not in names, names
assert "gloo:all_to_all" not in names, names  # which would take a round trip for each tensor
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recording:
    group.all_to_all_together(pair)
names = {event.key for event in recording.key_averages()}
assert "gloo:send" in names and "gloo:all_to_all" not in names, names  # nor of large ones
print(json.dumps(report))
leave()
leave()
"""

# One rank of two stages with two ranks each: sums within its stage travel to the other stage, and it prints what came.
# Small messages and one that is larger than a posted receive come in the order in which they were sent.
STAGED_RANK = """
import json, sys
import torch
from quire.core.wire.rank import Layout
from quire.executor.parallel.groups import RankGroups

torch.set_num_threads(1)
number, folder = int(sys.argv[1]), sys.argv[2]
layout = Layout(pipeline=2, tensor=2)
rank = layout.ranks()[number]
group, stages, _ = RankGroups.join(rank, layout, "cpu", f"file://{folder}/rendezvous")
total = group.all_reduce(torch.full((2,), 10.0 ** number))
sizes = [1, 300_000, 2, 300_000, 1, 1]  # of a part; more messages than may be under way
if rank.pipeline == 0:
    for step, size in enumerate(sizes):
        stages.send(torch.cat((total, torch.tensor([step, number]))).repeat_interleave(size))
    received = []
else:
    messages = [stages.receive(torch.empty(4 * size)).view(4, size) for size in sizes]
    assert all(torch.equal(each, each[:, :1].expand_as(each)) for each in messages)
    received = [each[:, 0].tolist() for each in messages]
total = group.all_reduce(total)
print(json.dumps([received, total.tolist()]))
"""

# One rank of two stages. The sender waits until its first message has left; the receiver asks for it only afterwards.
EARLY_RANK = """
import json, sys, time
from pathlib import Path
import torch
from quire.core.wire.rank import Layout
from quire.executor.parallel.groups import RankGroups

number, folder = int(sys.argv[1]), Path(sys.argv[2])
layout = Layout(pipeline=2)
_, stages, _ = RankGroups.join(layout.ranks()[number], layout, "cpu", f"file://{folder}/rendezvous")
num_messages, sent = layout.pipeline + 1, folder / "sent"
if number == 0:
    for step in range(num_messages):  # the last one waits for the first
        stages.send(torch.tensor([float(step)]))
    sent.touch()
    received = []
else:
    deadline = time.monotonic() + 40
    while not sent.exists():
        assert time.monotonic() < deadline, "the first message waits until it is asked for"
        time.sleep(0.01)
    received = [stages.receive(torch.empty(1)).item() for _ in range(num_messages)]
print(json.dumps(received))
"""


# Starts the ranks, each with its number before the other arguments, and gives each a file for what it prints. They are
# forks of one process that has their imports, which take longer than all that ranks do.
RANKS = """
import os, sys

source, size, folder, *args = sys.argv[1:]
imports, work = source.split("\\n\\n", 1)
exec(imports)
for number in range(int(size)):
    if os.fork() == 0:
        sys.argv[1:], sys.stdout = [str(number), *args], open(f"{folder}/{number}", "w")
        exec(work)
        sys.exit()
sys.exit(any([os.wait()[1] for _ in range(int(size))]))
"""


def reports_of(source: str, size: int, *args: str) -> list[Any]:
    """What `size` processes of the program `source` print, each started with its number and `args`."""
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", RANKS, source, str(size), folder, *args], check=True, timeout=60)
        return [json.loads(Path(folder, str(number)).read_text()) for number in range(size)]


def test_ranks_agree_to_the_bit(tmp_path: Path) -> None:
    size = 3  # with two ranks the order of addition could not show
    reports = reports_of(RANK, size, str(size), str(tmp_path))
    assert len(reports[0]) == 28
    assert all(report == reports[0] for report in reports)


def test_messages_travel_to_the_same_place_of_the_next_stage(tmp_path: Path) -> None:
    reports = reports_of(STAGED_RANK, 4, str(tmp_path))
    assert [total for _, total in reports] == [[22.0] * 2, [22.0] * 2, [2200.0] * 2, [2200.0] * 2]
    assert [received for received, _ in reports[:2]] == [[], []]
    for number, (received, _) in enumerate(reports[2:]):
        assert received == [[11.0, 11.0, step, number] for step in range(6)]


def test_messages_leave_before_the_next_stage_asks_for_them(tmp_path: Path) -> None:
    assert reports_of(EARLY_RANK, 2, str(tmp_path)) == [[], [0.0, 1.0, 2.0]]


def test_group_of_one_is_the_identity_and_needs_no_torch_distributed() -> None:
    group, stages, _ = RankGroups.join(Rank(), Layout(), "cpu", "")
    assert stages is None
    x = torch.arange(6.0).view(2, 3)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x


def test_workers_that_divide_positions() -> None:
    layout = Layout(pipeline=2, prefill=3, tensor=2)
    ranks = layout.ranks()
    for numbers in _context_groups(layout):
        members = [ranks[number] for number in numbers]
        assert [(rank.pipeline, rank.prefill, rank.tensor) for rank in members] == [
            (members[0].pipeline, copy, members[0].tensor) for copy in range(3)
        ]
    assert sorted(number for numbers in _context_groups(layout) for number in numbers) == list(range(12))
    assert _context_groups(Layout(tensor=4, context=2)) == [[0, 1], [2, 3]]


def test_too_few_devices_are_named(tmp_path: Path) -> None:
    size = torch.cuda.device_count() + 2
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} .* needs {size} CUDA devices"):
        RankGroups.join(Rank(), Layout(tensor=size), "cuda", f"file://{tmp_path}/rendezvous")
