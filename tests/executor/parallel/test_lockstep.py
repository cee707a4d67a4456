"""Steps that two engines take together, stage by stage, between real processes over gloo."""

from pathlib import Path

import pytest

from tests.executor.parallel.test_groups import reports_of

pytestmark = pytest.mark.turns(4, among="whole systems")

# One rank of two: in each step the first worker of one engine has a plan, which its second worker has not seen yet.
RANK = """
import json, sys, threading
import torch
from quire.core.wire.rank import Layout
from quire.executor.parallel.groups import RankGroups
from quire.executor.parallel.lockstep import Lockstep

torch.set_num_threads(1)
number, folder = int(sys.argv[1]), sys.argv[2]
layout = Layout(data=2, pipeline=int(sys.argv[3]), tensor=2, expert=4)
rank = [*layout.ranks(0), *layout.ranks(1)][number]
groups, called = RankGroups.join(rank, layout, "cpu", f"file://{folder}/rendezvous"), threading.Event()
lockstep = Lockstep.join(rank, layout, "cpu")
lockstep.listen(called.set)
steps = []
for step in range(3 - rank.pipeline):
    begins = rank.data == step % 2 and rank.tensor == 0
    while not (begins or lockstep.is_called):
        assert called.wait(30)
        called.clear()
    has_plan = lockstep.begin(5 + step if begins else 0)
    steps.append([has_plan, lockstep.num_tokens])
own = torch.tensor([float(number)])
sums = [int(group.all_reduce(own.clone())) for group in (groups.tensor, lockstep.engines, lockstep)]
print(json.dumps([steps, (lockstep.rank, lockstep.engines.rank), sums]))
"""


@pytest.mark.parametrize("stages", [1, 2])
def test_the_first_worker_of_an_engine_calls_all_others_and_decides_for_its_own(tmp_path: Path, stages: int) -> None:
    for number, (steps, ranks, sums) in enumerate(reports_of(RANK, 4 * stages, str(tmp_path), str(stages))):
        engine, stage, place = number // 2 // stages, number // 2 % stages, number % 2
        plans = [[step % 2 == engine, [5 + step, 0] if step % 2 == 0 else [0, 5 + step]] for step in range(3)]
        assert steps == plans[: 3 - stage]  # a stage takes steps of its own
        assert ranks == [2 * engine + place, engine]
        first = 2 * stage
        last = first + 2 * stages  # the same stage of the other engine
        assert sums == [2 * (last if engine else first) + 1, first + last + 2 * place, 2 * (first + last + 1)]
