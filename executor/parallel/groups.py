"""The groups of one rank, with the collectives that layers need, over gloo on a CPU, or NCCL.

Every rank of a tensor-parallel group gets the same bits: a gather copies, and each element is summed in one place, or
in one order on all ranks. So each rank can sample from gathered logits, and all get the same tokens.
"""

import atexit
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import torch

from quire.core.errors import ConfigError
from quire.core.wire.expert_rows import COUNTS_COST
from quire.core.wire.rank import Layout, Rank
from quire.executor.parallel.posted_receives import MAX_BYTES, PostedReceives
from quire.executor.parallel.stage_neighbours import DistributedNeighbours, GlooNeighbours, StageNeighbours


class Messages:
    """Tensors under way between ranks.

    Args:
        works: pending operations of torch.distributed.
    """

    def __init__(self, works: Sequence[Any] = ()) -> None:
        self._works = works

    def wait(self) -> None:
        """Returns when all have been sent and received. On CUDA, it only makes later kernels wait."""
        for work in self._works:
            work.wait()


class ParallelGroup:
    """The ranks that share each layer's weights. This one has one rank, and its collectives are the identity."""

    rank: int
    size: int
    counts_cost = COUNTS_COST
    """The cost of sending the number of rows in `all_to_all_rows`, as the bytes that take as long."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over ranks, any shape and float dtype. May overwrite `x`; use only the returned tensor."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Joins `x` of every rank along `dim` in rank order; `x` has the same shape on all ranks."""
        return x

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Sends part `rank` of `x` [size, ...] to each rank, and returns the parts for this one, in rank order."""
        return x

    def all_to_all_together(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs `all_to_all` for one or two tensors at once."""
        return [self.all_to_all(x) for x in tensors]

    def all_to_all_rows(self, rows: torch.Tensor, sent: list[int], limits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Runs `exchange_rows` for bytes between ranks that do not know how many rows they get.

        Args:
            rows: uint8.
            limits: the most rows that each rank may send to one other; a rank with 0 sends none.

        Returns:
            The received rows [num_received, width], and their number from each rank.
        """
        received = self.all_to_all(torch.tensor(sent, device=rows.device).unsqueeze(1)).flatten().tolist()
        return self.exchange_rows(rows, sent, received), received

    def exchange_rows(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Sends `sent[rank]` of the `rows` [num_sent, width] to each rank; returns `received[rank]` rows from each.

        Both are in the order of ranks.
        """
        came = rows.new_empty(sum(received), rows.shape[1])
        theirs, parts = rows.split(sent), came.split(received)
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self._swap(
            {peer: theirs[peer] for peer in peers if sent[peer]},
            {peer: parts[peer] for peer in peers if received[peer]},
        )
        parts[self.rank].copy_(theirs[self.rank])
        return came

    def _swap(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        """Runs `exchange` for at most one tensor with each rank."""
        self.exchange([*sent.items()], [*received.items()])

    def exchange(self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Sends tensors to ranks, and fills others from ranks. Tensors between two ranks arrive in order.

        All ranks call it at once, with dense tensors. No rank sends to itself.
        """
        self.begin_exchange(sent, received).wait()

    def begin_exchange(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> Messages:
        """Begins an `exchange`. Do not change or read its tensors before the messages' `wait` has returned."""
        return Messages()


class DistributedGroup(ParallelGroup):
    """A group of processes over torch.distributed.

    Args:
        distributed: the module, whose default group all ranks have joined.
        handle: the group within it.
    """

    def __init__(self, distributed: ModuleType, handle: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._distributed = distributed
        self._handle = handle

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._distributed.all_reduce(x, group=self._handle)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._distributed.all_gather(parts, x, group=self._handle)
        return torch.cat(parts, dim=dim)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        received = torch.empty_like(x)
        self._distributed.all_to_all_single(received, x, group=self._handle)
        return received

    def all_to_all_together(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sent = [x.contiguous() for x in tensors]
        received = [torch.empty_like(x) for x in sent]
        peers = [peer for peer in range(self.size) if peer != self.rank]
        messages = self.begin_exchange(
            [(peer, x[peer]) for x in sent for peer in peers], [(peer, x[peer]) for x in received for peer in peers]
        )
        for x, came in zip(sent, received, strict=True):
            came[self.rank].copy_(x[self.rank])
        messages.wait()
        return received

    def begin_exchange(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> Messages:
        both = ((self._distributed.isend, sent), (self._distributed.irecv, received))
        operations = [
            self._distributed.P2POp(call, tensor, group=self._handle, group_peer=peer)
            for call, messages in both
            for peer, tensor in messages
        ]
        return Messages(self._distributed.batch_isend_irecv(operations) if operations else ())


class GlooGroup(DistributedGroup):
    """A group over gloo. Sums are computed in the order of the ranks, so that a row's sum is the same in every batch.

    gloo itself sums in an order that depends on an element's place in the tensor. It takes two round trips or more for
    a sum, where small tensors need half of one. A receive may be larger than its message, so the number of rows is part
    of the message.
    """

    counts_cost = 0

    def __init__(self, distributed: ModuleType, handle: Any, rank: int, size: int) -> None:
        super().__init__(distributed, handle, rank, size)
        self._small = PostedReceives(distributed, handle, rank, size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if x.nbytes <= MAX_BYTES:
            return _sum_of(self._small.exchange(x))
        if self.size == 2:  # a sum of two does not depend on the order
            return super().all_reduce(x)
        # Each rank sums one part of the tensor.
        parts = list(x.view(-1).tensor_split(self.size))
        received = [torch.empty_like(parts[self.rank]) for _ in parts]
        received[self.rank] = parts[self.rank]
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self.exchange([(peer, parts[peer]) for peer in peers], [(peer, received[peer]) for peer in peers])
        parts[self.rank].copy_(_sum_of(received))
        own = [(peer, parts[self.rank]) for peer in peers]
        self.exchange(own, [(peer, parts[peer]) for peer in peers])
        return x

    def all_to_all_together(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if any(x.nbytes > MAX_BYTES * self.size for x in tensors):
            return super().all_to_all_together(tensors)
        return [torch.stack(parts) for parts in self._small.exchange_parts([list(x.contiguous()) for x in tensors])]

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        x = x.contiguous()
        return torch.cat(self._small.exchange(x), dim=dim) if x.nbytes <= MAX_BYTES else super().all_gather(x, dim)

    def all_to_all_rows(self, rows: torch.Tensor, sent: list[int], limits: list[int]) -> tuple[torch.Tensor, list[int]]:
        heads = torch.tensor(sent).unsqueeze(1).view(torch.uint8)  # the number of rows that follow
        messages = [torch.cat((head, part.flatten())) for head, part in zip(heads, rows.split(sent), strict=True)]
        head_bytes, row_bytes = heads.shape[1], rows.shape[1]
        came = [rows.new_empty(head_bytes + limit * row_bytes) for limit in limits]
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self._swap(
            {peer: messages[peer] for peer in peers if limits[self.rank]},
            {peer: came[peer] for peer in peers if limits[peer]},
            most_sent=came[self.rank].nbytes,
        )
        came[self.rank] = messages[self.rank]
        received = [int(each[:head_bytes].view(torch.int64)) if limits[peer] else 0 for peer, each in enumerate(came)]
        parts = [each[head_bytes:][: count * row_bytes] for each, count in zip(came, received, strict=True)]
        return torch.cat(parts).view(-1, row_bytes), received

    def _swap(
        self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor], most_sent: int | None = None
    ) -> None:
        """Sends small tensors to receives that were posted before. `most_sent`: the bytes that other ranks have room
        for.
        """
        small = {peer: x for peer, x in sent.items() if (most_sent or x.nbytes) <= MAX_BYTES}
        awaited = {peer: x for peer, x in received.items() if x.nbytes <= MAX_BYTES}
        large = self.begin_exchange(
            [(peer, x) for peer, x in sent.items() if peer not in small],
            [(peer, x) for peer, x in received.items() if peer not in awaited],
        )
        for x, numbers in zip(awaited.values(), self._small.swap(small.items(), awaited), strict=True):
            x.copy_(numbers[: x.nbytes].view(x.dtype).view(x.shape))
        large.wait()


def _sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


class RankGroups(NamedTuple):
    """The ranks of its engine with which a rank communicates, by shared work; see `Lockstep` for other engines' ranks.

    Attributes:
        tensor: the ranks with the layers of its stage.
        context: the ranks that divide the positions of sequences: some of `tensor`, and the same of other copies.
        stages: the pipeline neighbours; None if there is one stage.
    """

    tensor: ParallelGroup = ParallelGroup()
    stages: StageNeighbours | None = None
    context: ParallelGroup = ParallelGroup()

    @classmethod
    def join(cls, rank: Rank, layout: Layout, device: str, init_method: str) -> "RankGroups":
        """Joins the ranks of one engine, or of all engines if they share experts; returns once all have joined.

        Args:
            device: "cpu" or "cuda"; on cuda, worker number i of a host takes device i as its current one.
            init_method: the rendezvous: `file:///path/of/a/private/file`, or `tcp://address:port` of an open
                socket. The first rank of one host gets that with `?listen_fd=` and the socket's descriptor.

        Raises:
            ConfigError: there are fewer devices than ranks.
        """
        num_ranks = layout.world_size
        if num_ranks == 1:
            return cls()
        # Imported here, because a single worker, the usual case, does not need it.
        from torch import distributed

        number = layout.number(rank) + (rank.data * layout.num_workers if layout.shares_experts else 0)
        if device == "cuda":
            _check_devices(layout)
            torch.cuda.set_device(layout.local_index(rank))
        # Workers of one host need no other interface, and loopback works even without a resolvable host name. On CUDA,
        # too: `Lockstep` has gloo groups on every device. With several hosts, the variable is set already.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            rank=number,
            world_size=num_ranks,
            **_rendezvous(distributed, rank, num_ranks, init_method),
        )
        atexit.register(leave)
        kind = DistributedGroup if device == "cuda" else GlooGroup
        group, stages, context = ParallelGroup(), None, ParallelGroup()
        if layout.tensor > 1:
            # Each rank creates all groups, in the same order.
            firsts = range(0, num_ranks, layout.tensor)
            handles = [distributed.new_group(list(range(first, first + layout.tensor))) for first in firsts]
            group = kind(distributed, handles[number // layout.tensor], rank.tensor, layout.tensor)
        if layout.sequence > 1:
            for numbers in _context_groups(layout):
                handle = distributed.new_group(numbers)
                if number in numbers:
                    context = kind(distributed, handle, numbers.index(number), layout.sequence)
        if layout.pipeline > 1:
            before = number - layout.stage_size if rank.pipeline > 0 else None
            after = number + layout.stage_size if rank.pipeline < layout.pipeline - 1 else None
            neighbours = DistributedNeighbours if device == "cuda" else GlooNeighbours
            stages = neighbours(distributed, before, after, layout.pipeline)
        return cls(group, stages, context)


def _context_groups(layout: Layout) -> list[list[int]]:
    """Lists the workers that divide positions with one another, by their numbers."""
    copies = range(0, layout.stage_size, layout.tensor)
    return [
        [first + copy + place for copy in copies for place in range(begin, begin + layout.context)]
        for first in range(0, layout.world_size, layout.stage_size)
        for begin in range(0, layout.tensor, layout.context)
    ]


def leave() -> None:
    """Leaves all groups of this process. Idempotent."""
    from torch import distributed  # as in `join`

    if distributed.is_initialized():
        distributed.destroy_process_group()


def _rendezvous(distributed: ModuleType, rank: Rank, num_ranks: int, init_method: str) -> dict[str, Any]:
    """Returns the arguments of `init_process_group` for the rendezvous.

    Torch alone would listen for `tcp://` on all interfaces. A socket that it is given is bound to one address.
    """
    place = urlsplit(init_method)
    if place.scheme != "tcp":
        return {"init_method": init_method}
    given = parse_qs(place.query).get("listen_fd", [])
    fd = int(given[0]) if given and rank.is_first else None
    store = distributed.TCPStore(place.hostname, place.port, num_ranks, is_master=fd is not None, master_listen_fd=fd)
    return {"store": store}


def _check_devices(layout: Layout) -> None:
    count, needed = torch.cuda.device_count(), layout.num_local
    if count < needed:
        raise ConfigError(
            f"--tensor-parallel-size {layout.tensor} times --pipeline-parallel-size {layout.pipeline} times "
            f"--prefill-context-parallel-size {layout.prefill} needs {needed} CUDA devices on each host, and {count} "
            "are visible; lower one of them, or see CUDA_VISIBLE_DEVICES."
        )
