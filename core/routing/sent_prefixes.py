"""An estimate of each engine's prefix cache, from the prompts that were sent to it."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class SentPrefixes:
    """A prefix tree over the prompts that were sent to each engine, forgotten in LRU order as an engine's pages are.

    A block's name represents the whole path to it, so the tree is one table. It maps names to the engines that were
    sent the block, as bits of an integer. Engines evict pages for reasons unknown here, and keep some that are
    forgotten here. A wrong guess costs time, but never changes a token.

    Args:
        num_engines: engines, which are numbered from 0.
        max_blocks: bound on the blocks of all engines together. Each engine has an equal part.
    """

    def __init__(self, num_engines: int, max_blocks: int) -> None:
        self._most = max(1, max_blocks // num_engines)  # of one engine
        self._capacity = [self._most] * num_engines
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]  # by last use
        self._engines: dict[int, int] = {}  # by block: bit e is set if engine e was sent the block

    def set_capacity(self, engine: int, num_blocks: int) -> None:
        """Sets the number of blocks that an engine's cache can hold."""
        self._capacity[engine] = min(num_blocks, self._most)
        self._shrink(engine)

    def add(self, engine: int, blocks: Sequence[int]) -> int:
        """Notes that an engine was sent a prompt. Returns how many of its blocks it was sent before."""
        sent, bit = self._sent[engine], 1 << engine
        num_known = 0
        for block in reversed(blocks):  # the first block is the last to be forgotten
            if block in sent:
                sent.move_to_end(block)
                num_known += 1
            else:
                sent[block] = None
                self._engines[block] = self._engines.get(block, 0) | bit
        self._shrink(engine)
        return num_known

    def forget(self, engine: int) -> None:
        """Forgets an engine's blocks: its cache was reset, or the engine was replaced."""
        for block in self._sent[engine]:
            self._drop(engine, block)
        self._sent[engine].clear()

    def matches(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields (number of blocks, engines as bits) for each length of a common prefix, the shortest first. An engine
        appears once, at the longest part of the prompt that it has. Engines without any are left out."""
        alike = -1  # all engines
        for depth, block in enumerate(blocks):
            longer = alike & self._engines.get(block, 0)
            if depth and longer != alike:
                yield depth, alike & ~longer
            if not longer:
                return
            alike = longer
        if blocks:
            yield len(blocks), alike

    def _shrink(self, engine: int) -> None:
        sent = self._sent[engine]
        while len(sent) > self._capacity[engine]:
            self._drop(engine, sent.popitem(last=False)[0])

    def _drop(self, engine: int, block: int) -> None:
        left = self._engines[block] & ~(1 << engine)
        if left:
            self._engines[block] = left
        else:
            del self._engines[block]
