"""The ranks of all engines that hold one set of experts, and the start of the steps that they run together."""

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.groups import DistributedGroup, GlooGroup, ParallelGroup
from quire.executor.parallel.unprofiled_messages import start_unprofiled

IDLE_LIMIT = timedelta(days=3650)
"""The longest time for which the engines may be idle."""


class Lockstep(DistributedGroup):
    """The ranks of one stage of all engines, numbered by their expert coordinates.

    The stages' steps are independent: a plan is in one step of every stage, and may be together with different plans of
    other engines in each. A stage waits only for earlier stages, whose sends never block (`DistributedNeighbours`). So
    there is no cycle of waiting.

    All ranks take part in every step, since each has experts for the tokens of all. A rank whose engine has no plan
    sleeps until another rank wakes it for a step. Before a step all ranks exchange their engines' numbers of tokens. A
    rank without tokens computes its experts for the others.

    Wake-ups and the exchange before a step go over gloo, on any device.

    Args:
        handles: the groups of all these ranks, for their tensors, for wake-ups, and for the starts of steps.

    Attributes:
        engines: this rank's tensor coordinate in each engine, by the engines' numbers.
        num_tokens: of each engine in the current step.
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
        self._step = 0  # index of the next step
        self._called = -1  # the last step that another rank has started
        self._calls: list[tuple[Any, torch.Tensor]] = []  # the transport reads the memory until the message is received

    @classmethod
    def join(cls, rank: Rank, layout: Layout, device: str) -> "Lockstep":
        """Creates the groups of a rank that has joined those of `RankGroups` on `device`. Every rank has to call it."""
        from torch import distributed  # as in `RankGroups.join`

        kind = DistributedGroup if device == "cuda" else GlooGroup
        own: tuple[Any, Any, Any] | None = None
        engines = ParallelGroup()
        for stage in range(layout.pipeline):  # each rank creates all groups, in the same order
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
        """Calls `wake` from another thread whenever a rank starts a step."""
        threading.Thread(target=self._listen, args=(wake,), name="lockstep", daemon=True).start()

    @property
    def is_called(self) -> bool:
        """True if another rank has started the next step."""
        return self._called >= self._step

    def begin(self, num_tokens: int) -> bool:
        """Starts the next step, once all ranks have called this.

        The first of an engine's ranks decides whether the engine's plan is in the step, because the others may have
        received the plan earlier or later.

        Args:
            num_tokens: of the engine's next plan; 0 if this rank has none.

        Returns:
            True if the engine has a plan in the step. It is the next one, which may not have arrived yet.
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
        """Wakes all other ranks for the next step."""
        for work, _ in self._calls:
            work.wait()
        step = torch.tensor([self._step])
        others = [rank for rank in range(self.size) if rank != self.rank]
        send, bells = self._distributed.isend, self._bells
        self._calls = [(start_unprofiled(send, step, group=bells, group_dst=rank), step) for rank in others]

    def _listen(self, wake: Callable[[], None]) -> None:
        step = torch.zeros(1, dtype=torch.int64)
        with suppress(RuntimeError):  # this process has left its groups
            while True:
                self._distributed.recv(step, group=self._bells)
                self._called = max(self._called, int(step))
                wake()
