"""Blocks of tensors that travel round a ring of ranks, and attention to one while the next is under way.

A rank attends to the keys of all ranks, either because its queries come to each of them, or because the keys of each
come to it ("Context Parallelism for Scalable Million-Token Inference", arXiv:2411.01783). In both cases it holds two
blocks of those that travel, however many ranks there are.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quire.executor.parallel.groups import Messages, ParallelGroup

Part = tuple[Tensor, Tensor]
"""Outputs [num_tokens, num_heads, size] and logarithms [num_tokens, num_heads]; see `Backend.partial_attention`."""

AttendToBlock = Callable[[int, Tensor], Part]
"""The attention that the block of a rank takes part in, by the rank's number."""


def pass_queries(group: ParallelGroup, queries: Tensor, attend: AttendToBlock) -> list[Part]:
    """The parts of this rank's `queries`, by the rank whose keys they are of. Queries travel, and parts come back.

    Parts travel while a later block is attended with; of those made for other ranks, two are kept at most.
    """
    parts: dict[int, Part] = {}
    under_way: deque[Messages] = deque()
    for source, block in travel(group, queries):
        part = attend(source, block)
        if source == group.rank:
            parts[source] = part
            continue
        while len(under_way) > 1:
            under_way.popleft().wait()
        peer = (2 * group.rank - source) % group.size  # as far after this rank as `source` is before it
        parts[peer] = torch.empty_like(part[0]), torch.empty_like(part[1])
        sent = [(source, tensor.contiguous()) for tensor in part]
        under_way.append(group.begin_exchange(sent, [(peer, tensor) for tensor in parts[peer]]))
    for messages in under_way:
        messages.wait()
    return [parts[rank] for rank in range(group.size)]


def pass_keys(group: ParallelGroup, keys: Tensor, attend: AttendToBlock) -> list[Part]:
    """The parts of this rank's queries, by the rank whose keys they are of. Keys travel; `keys` are this rank's."""
    parts = {source: attend(source, block) for source, block in travel(group, keys)}
    return [parts[rank] for rank in range(group.size)]


def travel(group: ParallelGroup, block: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each rank's number and `block`, from this rank's downwards, while the next block is under way.

    All ranks give the same shape. A block may be read until the next one is asked for.
    """
    block = block.contiguous()
    for turn in range(group.size):
        arriving, messages = block, Messages()
        if turn < group.size - 1:
            arriving = torch.empty_like(block)
            after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            messages = group.begin_exchange([(after, block)], [(before, arriving)])
        yield (group.rank - turn) % group.size, block
        messages.wait()
        block = arriving
