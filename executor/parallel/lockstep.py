"""The ranks that hold one set of experts, of all engines, and the beginning of the steps that they take together."""

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import DistributedGroup, GlooGroup, ParallelGroup
from quire.executor.parallel.unrecorded import unrecorded

IDLE_LIMIT = timedelta(days=3650)
"""How long the engines may have nothing to do."""


class Lockstep(DistributedGroup):
    """The ranks of one stage of all engines; their numbers are the expert coordinates.

    Each stage takes steps of its own: a plan is in one step of every stage, and may be beside another engine's plans in
    each. A stage waits for earlier ones alone, whose sends wait for nobody (`DistributedNeighbours`), so none waits for
    itself.

    Every step is taken by all of them, since each has experts for the tokens of all. A rank whose engine has no plan
    sleeps until another one calls for a step. Before a step each rank tells all others how many tokens its engine has
    in it: a rank without any computes its experts for the others.

    What has to reach a sleeping rank and what all ranks wait for goes over gloo, whatever the device.

    Args:
        handles: the groups of all these ranks, for their tensors, for calls, and for the beginnings of steps.

    Attributes:
        engines: this rank's tensor coordinate in each engine, by the engines' numbers.
        num_tokens: of each engine in the step that was begun last.
    """

    def __init__(
        self, distributed: ModuleType, rank: Rank, layout: Layout, engines: ParallelGroup, handles: tuple[Any, Any, Any]
    ) -> None:
        group, bells, heads = handles
        super().__init__(distributed, group, rank.expert, layout.expert)
        self.engines = engines
        self.num_tokens = [0] * layout.data
        self._leads = rank.tensor == 0
        self._tensor = layout.tensor
        self._bells = bells
        self._heads = heads
        self._step = 0  # number of the next one
        self._called = -1  # the last one that another rank has called for
        self._calls: list[tuple[Any, torch.Tensor]] = []  # the transport reads the memory until it is received

    @classmethod
    def join(cls, rank: Rank, layout: Layout, device: str) -> "Lockstep":
        """The groups of a rank that has joined those of `RankGroups` on `device`. Every rank has to call it."""
        from torch import distributed  # as in `RankGroups.join`

        kind = DistributedGroup if device == "cuda" else GlooGroup
        own: tuple[Any, Any, Any] | None = None
        engines = ParallelGroup()
        for stage in range(layout.pipeline):  # each rank makes all groups, in the same order
            ranks = [each for data in range(layout.data) for each in layout.ranks(data) if each.pipeline == stage]
            numbers = [each.data * layout.num_workers + layout.number(each) for each in ranks]
            by_tensor = [distributed.new_group(numbers[tensor :: layout.tensor]) for tensor in range(layout.tensor)]
            group = distributed.group.WORLD if layout.pipeline == 1 else distributed.new_group(numbers)
            bells = distributed.new_group(numbers, backend="gloo", timeout=IDLE_LIMIT)
            heads = distributed.new_group(numbers, backend="gloo")
            if stage == rank.pipeline:
                own = group, bells, heads
                engines = kind(distributed, by_tensor[rank.tensor], rank.data, layout.data)
        assert own is not None
        return cls(distributed, rank, layout, engines, own)

    def listen(self, wake: Callable[[], None]) -> None:
        """Calls `wake` from another thread whenever a rank has called for a step."""
        threading.Thread(target=self._listen, args=(wake,), name="lockstep", daemon=True).start()

    @property
    def is_called(self) -> bool:
        """Whether a rank has called for the next step."""
        return self._called >= self._step

    def begin(self, num_tokens: int) -> bool:
        """Begins the next step, as soon as all ranks have called this.

        Of an engine's ranks, the first decides whether a plan of theirs is in the step: the others may have seen the
        plan sooner or later.

        Args:
            num_tokens: of the engine's next plan; 0 if this rank has none.

        Returns:
            Whether the engine has a plan in the step. It is the next one, which may not be here yet.
        """
        if num_tokens and self._leads and not self.is_called:
            self._call()
        self._step += 1
        own = torch.tensor([num_tokens])
        heads = [torch.empty_like(own) for _ in range(self.size)]
        self._distributed.all_gather(heads, own, group=self._heads)
        self.num_tokens = [int(head) for head in heads[:: self._tensor]]
        return self.num_tokens[self.engines.rank] > 0

    def _call(self) -> None:
        """Calls all other ranks, which may sleep, for the next step."""
        for work, _ in self._calls:
            work.wait()
        step = torch.tensor([self._step])
        others = [rank for rank in range(self.size) if rank != self.rank]
        send, bells = self._distributed.isend, self._bells
        self._calls = [(unrecorded(send, step, group=bells, group_dst=rank), step) for rank in others]

    def _listen(self, wake: Callable[[], None]) -> None:
        step = torch.zeros(1, dtype=torch.int64)
        with suppress(RuntimeError):  # this process has left its groups
            while True:
                self._distributed.recv(step, group=self._bells)
                self._called = max(self._called, int(step))
                wake()
