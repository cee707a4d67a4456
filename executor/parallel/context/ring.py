"""Passes blocks of tensors around a ring of ranks, and attends to one while the next is under way.

A rank attends to the keys of all ranks: either its queries travel to each of them, or the keys of each travel to it
("Context Parallelism for Scalable Million-Token Inference", arXiv:2411.01783). In both cases it holds two travelling
blocks, for any number of ranks.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from quire.executor.parallel.groups import Messages, ParallelGroup

AttentionPart = tuple[Tensor, Tensor]
"""Outputs [num_tokens, num_heads, size] and log-sum-exps [num_tokens, num_heads]; see `Backend.partial_attention`."""

AttendToBlock = Callable[[int, Tensor], AttentionPart]
"""Attends with the block of a rank, by the rank's number."""


def pass_queries(group: ParallelGroup, queries: Tensor, attend: AttendToBlock) -> list[AttentionPart]:
    """Passes queries around, and returns the parts of this rank's `queries`, by the rank of their keys.

    Parts travel back while a later block is computed. At most three parts for other ranks exist at a time: two under
    way, and the one that is being computed.
    """
    parts: dict[int, AttentionPart] = {}
    under_way: deque[Messages] = deque()

    def attend_and_send(source: int, block: Tensor) -> None:
        part = attend(source, block)
        if source == group.rank:
            parts[source] = part
            return
        while len(under_way) > 1:
            under_way.popleft().wait()
        peer = (2 * group.rank - source) % group.size  # as far after this rank as `source` is before it
        parts[peer] = torch.empty_like(part[0]), torch.empty_like(part[1])
        sent = [(source, tensor.contiguous()) for tensor in part]
        under_way.append(group.begin_exchange(sent, [(peer, tensor) for tensor in parts[peer]]))

    travel(group, lambda: queries, attend_and_send)
    for messages in under_way:
        messages.wait()
    return [parts[rank] for rank in range(group.size)]


def pass_keys(group: ParallelGroup, make_block: Callable[[], Tensor], attend: AttendToBlock) -> list[AttentionPart]:
    """Passes keys around, and returns the parts of this rank's queries, by the rank of their keys.

    Args:
        make_block: copies this rank's keys into a block, and keeps no reference to it.
    """
    parts: dict[int, AttentionPart] = {}

    def keep_part(source: int, block: Tensor) -> None:
        parts[source] = attend(source, block)

    travel(group, make_block, keep_part)
    return [parts[rank] for rank in range(group.size)]


def travel(group: ParallelGroup, make_block: Callable[[], Tensor], use: Callable[[int, Tensor], None]) -> None:
    """Calls `use` with each rank's number and block, from this rank's downwards, while the next block is under way.

    No reference to a used block stays, so that there are two at a time.

    Args:
        make_block: builds this rank's block; those of all ranks have the same shape.
        use: may read the block until it returns.
    """
    block = make_block().contiguous()
    for turn in range(group.size):
        arriving, messages = block, Messages()
        if turn < group.size - 1:
            arriving = torch.empty_like(block)
            after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            messages = group.begin_exchange([(after, block)], [(before, arriving)])
        use((group.rank - turn) % group.size, block)
        messages.wait()
        block = arriving
