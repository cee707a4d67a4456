"""What each engine's prefix cache probably holds, as seen by the one who sent it the prompts."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class SentPrefixes:
    """A prefix tree over the prompts that were sent to each engine, forgotten in LRU order as an engine's pages are.

    A block's name stands for the whole path to it, so the tree is one table from names to the engines that were sent
    the block, as bits of an integer. Engines drop pages for reasons that are not known here, and keep some that are
    forgotten here: a wrong guess costs time, and no token.

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
        """The blocks that an engine's cache has room for."""
        self._capacity[engine] = min(num_blocks, self._most)
        self._shrink(engine)

    def add(self, engine: int, blocks: Sequence[int]) -> int:
        """An engine is sent a prompt. Returns how many of its blocks it was sent before."""
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
        """An engine's cache is empty: it was reset, or the engine is another one now."""
        for block in self._sent[engine]:
            self._drop(engine, block)
        self._sent[engine].clear()

    def matches(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """For each length of a common prefix, in blocks, the engines that have so long a part of the prompt and no
        longer one: (number of blocks, engines as bits), the shortest first. Engines that have none are left out."""
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
