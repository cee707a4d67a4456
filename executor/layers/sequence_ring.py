"""Blocks of tensors that travel round a ring of ranks, and attention to one while the next is under way.

A rank attends to the keys of all ranks, either because its queries come to each of them, or because the keys of each
come to it ("Context Parallelism for Scalable Million-Token Inference", arXiv:2411.01783). In both cases it holds two
blocks of those that travel, however many ranks there are.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from quire.executor.parallel.groups import Messages, ParallelGroup

Part = tuple[Tensor, Tensor]
"""Outputs [num_tokens, num_heads, size] and logarithms [num_tokens, num_heads]; see `Backend.partial_attention`."""

AttendToBlock = Callable[[int, Tensor], Part]
"""The attention that the block of a rank takes part in, by the rank's number."""


def pass_queries(group: ParallelGroup, queries: Tensor, attend: AttendToBlock) -> list[Part]:
    """The parts of this rank's `queries`, by the rank whose keys they are of. Queries travel, and parts come back.

    Parts travel while a later block is attended with. Of those made for other ranks, three are kept at most: two that
    are under way, and the one that is being made.
    """
    parts: dict[int, Part] = {}
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


def pass_keys(group: ParallelGroup, make_block: Callable[[], Tensor], attend: AttendToBlock) -> list[Part]:
    """The parts of this rank's queries, by the rank whose keys they are of. Keys travel.

    Args:
        make_block: makes the block of this rank's keys, and does not keep it.
    """
    parts: dict[int, Part] = {}

    def keep_part(source: int, block: Tensor) -> None:
        parts[source] = attend(source, block)

    travel(group, make_block, keep_part)
    return [parts[rank] for rank in range(group.size)]


def travel(group: ParallelGroup, make_block: Callable[[], Tensor], use: Callable[[int, Tensor], None]) -> None:
    """Calls `use` with each rank's number and block, from this rank's downwards, while the next block is under way.

    Nobody else holds a block that has been used, so that there are two at a time.

    Args:
        make_block: makes this rank's block; those of all ranks have the same shape.
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
