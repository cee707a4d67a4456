"""The rules of each kind of KV group, over positions and blocks: which blocks of a request need pages.

A `KVGroup` holds rules only. A request's block tables hold its pages; the pool knows which pages are free or cached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.core.wire.kv_groups import KVGroupSpec


class KVGroup(Protocol):
    def first_needed_block(self, position: int) -> int:
        """The first block that the token at `position`, or any later one, sees."""

    def num_blocks(self, num_tokens: int, end: int) -> int:
        """Blocks that the table of a request with `num_tokens` spans once the tokens before `end` are planned."""

    def settled_until(self, first: int, end: int) -> int:
        """Tokens that can be planned, one a step, before a table with pages for blocks `first` to `end - 1` changes.

        After those tokens the table lacks a page, or holds one that can be given back.
        """

    def longest_prefix(self, is_cached: Callable[[int], bool], num_blocks: int) -> int:
        """The most leading blocks, up to `num_blocks`, after which this group's cached pages let a request continue."""

    def max_pages(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens holds at its worst moment."""


@dataclass(frozen=True)
class FullGroup:
    """A token sees every token before it.

    All of a prompt's pages are allocated at once, though its chunks may take several steps: a prompt that does not fit
    should wait rather than be preempted half-way.
    """

    spec: KVGroupSpec
    block_size: int
    largest_chunk: int

    def first_needed_block(self, position: int) -> int:
        return 0

    def num_blocks(self, num_tokens: int, end: int) -> int:
        return -(-(num_tokens if num_tokens > end else end) // self.block_size)

    def settled_until(self, first: int, end: int) -> int:
        return end * self.block_size

    def longest_prefix(self, is_cached: Callable[[int], bool], num_blocks: int) -> int:
        return next((block for block in range(num_blocks) if not is_cached(block)), num_blocks)

    def max_pages(self, num_tokens: int) -> int:
        return self.spec.max_pages(num_tokens, block_size=self.block_size, largest_chunk=self.largest_chunk)


@dataclass(frozen=True)
class WindowGroup:
    """A token sees the last `window` tokens, itself included.

    Pages are allocated as chunks are planned, and released once no uncomputed token sees them.
    """

    spec: KVGroupSpec
    window: int
    block_size: int
    largest_chunk: int

    def first_needed_block(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.block_size

    def num_blocks(self, num_tokens: int, end: int) -> int:
        return -(-end // self.block_size)

    def settled_until(self, first: int, end: int) -> int:
        num_seeing = (first + 1) * self.block_size + self.window - 1  # later tokens see nothing of block `first`
        return min(num_seeing, end * self.block_size)

    def longest_prefix(self, is_cached: Callable[[int], bool], num_blocks: int) -> int:
        block = num_blocks - 1
        while block >= self.first_needed_block(num_blocks * self.block_size):
            if not is_cached(block):
                num_blocks = block
            block -= 1
        return num_blocks

    def max_pages(self, num_tokens: int) -> int:
        return self.spec.max_pages(num_tokens, block_size=self.block_size, largest_chunk=self.largest_chunk)


def make_groups(specs: Sequence[KVGroupSpec], *, block_size: int, largest_chunk: int) -> list[KVGroup]:
    """The rules of each group in `specs`, in order."""
    return [
        FullGroup(spec, block_size, largest_chunk)
        if spec.window is None
        else WindowGroup(spec, spec.window, block_size, largest_chunk)
        for spec in specs
    ]
