"""Block tables of requests over the page pool, and the prefix cache.

Owns which page holds which block of which request. Knows nothing of slots, budgets or steps.

A block is announced to the prefix cache as soon as the step that computes its last token is planned and all its token
ids are known. Requests planned later in the same step can therefore share it. Sharing is safe, because workers execute
plans strictly in order, and within a step each layer writes the keys and values of all rows before its attention reads
any. A block that contains a placeholder (a token still being sampled) has no hash yet. It is announced when the request
next grows or is freed; its ids have arrived by then.
"""

import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence

from quire.core.kv.block_table import BlockTable
from quire.core.kv.groups import make_groups
from quire.core.kv.page_pool import PagePool, block_hash, root_hash
from quire.core.kv.paged_request import PagedRequest
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import ROW_DIGEST_BYTES


class KVCacheManager:
    """Gives pages to requests, finds shared prefixes, takes pages back.

    Args:
        kv_groups: the model's KV groups; a request has a block table in each.
        num_pages: pages of the pool, any of which may serve any group.
        block_size: tokens of a page.
        largest_chunk: the most tokens of a request that one step computes.
        enable_prefix_caching: whether full pages stay findable when no request uses them.
    """

    def __init__(
        self,
        kv_groups: Sequence[KVGroupSpec],
        *,
        num_pages: int,
        block_size: int,
        largest_chunk: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._pool = PagePool(num_pages)
        self._block_size = block_size
        self._groups = make_groups(kv_groups, block_size=block_size, largest_chunk=largest_chunk)
        # Groups that see farthest come first: they stop at the first missing block, which saves the others look-ups.
        self._lookup_order = sorted(enumerate(self._groups), key=lambda entry: entry[1].first_needed_block(sys.maxsize))
        self._caching = enable_prefix_caching
        self._num_queries = 0
        self._num_hits = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._pool.num_pages

    @property
    def usage(self) -> float:
        """Share of pages in use, 0 to 1; cached pages that no block table refers to do not count."""
        return self._pool.num_in_use / self._pool.num_pages

    def max_pages(self, num_tokens: int) -> int:
        """Pages that a request holds at its worst moment, when it ends with `num_tokens` tokens computed."""
        return sum(group.max_pages(num_tokens) for group in self._groups)

    def admit(self, request: PagedRequest, prefix: list[BlockTable], num_tokens: int, *, num_running: int) -> bool:
        """Builds the block tables of `request` for its first `num_tokens` tokens, those of `prefix` included.

        Returns False and changes nothing when the pool cannot hold all known tokens of the request and one more block
        for each of `num_running` requests: the first of those to grow would preempt the newcomer.
        """
        num_held = sum(len(table.pages) for table in prefix)
        num_taken = self.max_pages(request.num_tokens) - num_held
        num_taken += sum(self._pool.num_cached_among(table.pages) for table in prefix)
        if num_taken + num_running * len(self._groups) > self._pool.num_available:
            return False
        for table in prefix:
            self._pool.share(table.pages)
        request.block_tables = prefix
        request.num_cached_blocks = prefix[0].end
        request.num_planned_tokens = prefix[0].end * self._block_size
        added = self.grow(request, num_tokens)
        assert added is not None, "a group took more pages than it said at most"
        if self._caching and not request.num_preemptions:
            self._num_queries += request.num_tokens
            self._num_hits += request.num_planned_tokens
        return True

    def find_prefix(self, request: PagedRequest) -> list[BlockTable]:
        """Per KV group, a table that ends after the longest prefix that every group can continue from.

        The prefix is never the whole sequence: at least the last known token must be computed, because the next one is
        sampled from its logits. A request may also ask for no prefix, and a prompt that is scored
        has none, because the cache keeps no log-probabilities.
        """
        if not self._caching or request.skips_prefix_cache:
            return [BlockTable(group) for group in self._groups]
        hashes = request.block_hashes
        num_blocks = (request.num_tokens - 1) // self._block_size
        self._hash_blocks(request, num_blocks)
        num_agreed = 0  # groups in a row that can continue after `num_blocks` blocks
        for index, group in itertools.cycle(self._lookup_order):
            longest = group.longest_prefix(self._is_cached(hashes, index), num_blocks)
            num_agreed = num_agreed + 1 if longest == num_blocks else 1
            num_blocks = longest
            if num_agreed == len(self._groups):
                break
        prefix = []
        for index, group in enumerate(self._groups):
            first = group.first_needed_block(num_blocks * self._block_size)
            keys = [(digest, index) for digest in hashes[first:num_blocks]]
            prefix.append(BlockTable(group, first, self._pool.pages_of(keys)))
        return prefix

    def is_underway(self, request: PagedRequest, prefix: list[BlockTable], running: Iterable[PagedRequest]) -> bool:
        """Whether one of `running` computes the block that `request` needs after its `prefix`.

        The scheduler lets such a request wait, so that a prompt that several requests share is computed once.
        """
        block = prefix[0].end
        if block >= len(request.block_hashes):
            return False
        end, digest = (block + 1) * self._block_size, request.block_hashes[block]
        return any(
            other.num_planned_tokens < end <= len(other.block_hashes) * self._block_size
            and other.block_hashes[block] == digest
            for other in running
        )

    def grow(self, request: PagedRequest, num_tokens: int) -> list[list[int]] | None:
        """Gives back pages that no token still to be computed sees, and takes those that `num_tokens` tokens need.

        Returns the new pages per group, or None if too few are left: then pages were given back and none taken. Steps
        in flight may still read pages that are given back. The plan being built must not: call this before the
        request's row is planned.
        """
        self.cache_full_blocks(request)  # first, so that pages given back can be found
        pool, tables = self._pool, request.block_tables
        position, num_known = request.num_computed_tokens, request.num_tokens  # nothing before `position` comes again
        num_missing = []
        for table in tables:
            first = table.group.first_needed_block(position)
            if first > table.first:
                pool.release(table.drop_before(first))
            num_missing.append(max(0, table.group.num_blocks(num_known, num_tokens) - table.end))
        if sum(num_missing) > pool.num_available:
            return None
        added = [pool.allocate(count) for count in num_missing]
        for table, pages in zip(tables, added, strict=True):
            table.pages += pages
        request.pages_settled_until = min([table.group.settled_until(table.first, table.end) for table in tables])
        return added

    def cache_full_blocks(self, request: PagedRequest) -> None:
        """Announces the full blocks of `request` whose tokens are all planned and known.

        A draft is not known before it is accepted, so no draft is ever announced.
        """
        if not self._caching:
            return
        start = request.num_cached_blocks
        end = min(request.num_planned_tokens, request.num_known_tokens) // self._block_size
        if end <= start:
            return
        self._hash_blocks(request, end)
        for index, table in enumerate(request.block_tables):
            for block in range(max(start, table.first), end):
                self._pool.name(table.pages[block - table.first], (request.block_hashes[block], index))
        request.num_cached_blocks = end

    def free(self, request: PagedRequest) -> None:
        """Takes the request's pages back; full ones stay findable.

        The tail is released first, and so evicted first: others are most likely to share a sequence's head.
        """
        self.cache_full_blocks(request)
        blocks = itertools.zip_longest(*(reversed(table.pages) for table in request.block_tables))
        self._pool.release(page for pages in blocks for page in pages if page is not None)
        request.block_tables = []
        request.num_cached_blocks = 0
        request.num_planned_tokens = 0
        request.pages_settled_until = 0

    def disown(self, request: PagedRequest) -> None:
        """Makes every block that `request` ever announced unfindable, because its keys and values cannot be trusted."""
        self._pool.disown((digest, group) for digest in request.block_hashes for group in range(len(self._groups)))

    @property
    def prefix_cache_counts(self) -> tuple[int, int]:
        """(tokens looked up, tokens found) at all first admissions."""
        return self._num_queries, self._num_hits

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached page that no request uses; True when no page is findable any more."""
        return self._pool.drop_cached()

    def check_invariants(self, requests: Iterable[PagedRequest]) -> None:
        """Asserts that pages and the block tables of `requests`, all that exist, account for each other exactly."""
        held = list(requests)
        self._pool.check_invariants(
            [page for request in held for table in request.block_tables for page in table.pages]
        )
        for request in held:
            name, num_computed = request.request_id, request.num_computed_tokens
            for group, table in zip(self._groups, request.block_tables, strict=bool(request.block_tables)):
                assert table.group is group, f"{name} has the block table of another KV group"
                assert len(set(table.pages)) == len(table.pages), f"{name} holds a page twice"
                assert request.num_planned_tokens <= table.end * self._block_size, f"{name} outran its pages"
                assert table.first <= group.first_needed_block(num_computed), f"{name} gave back a page that it needs"
                settled_until = group.settled_until(table.first, table.end)
                assert request.pages_settled_until <= settled_until, f"{name} would overlook that its pages must change"

    def _is_cached(self, hashes: list[bytes], index: int) -> Callable[[int], bool]:
        """Whether the pool has the page of the `index`-th group for a block of the sequence with `hashes`."""
        find = self._pool.find
        return lambda block: find((hashes[block], index)) is not None

    def _hash_blocks(self, request: PagedRequest, num_blocks: int) -> None:
        """Extends `request.block_hashes` to the first `num_blocks` blocks, whose tokens are known.

        Blocks of the prompt alone are hashed once for all sequences that share it.
        """
        hashes, shared = request.block_hashes, request.prompt.block_hashes
        if len(hashes) >= num_blocks:
            return
        num_shared = min(num_blocks, request.num_prompt_tokens // self._block_size)
        self._extend_hashes(shared, request, num_shared)
        hashes += shared[len(hashes) : num_shared]
        self._extend_hashes(hashes, request, num_blocks)

    def _extend_hashes(self, hashes: list[bytes], request: PagedRequest, num_blocks: int) -> None:
        """Extends the hashes of the leading blocks of `request` to `num_blocks` of them."""
        size = self._block_size
        start = len(hashes)
        if start >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(request.prompt.cache_salt)
        token_bytes = array("q", request.known_tokens(start * size, num_blocks * size)).tobytes()
        stride = size * 8
        if request.prompt.embeds is None:
            for offset in range(0, len(token_bytes), stride):
                parent = block_hash(parent, token_bytes[offset : offset + stride])
                hashes.append(parent)
            return
        digests, length = request.prompt.embeds.row_digests, size * ROW_DIGEST_BYTES
        for index in range(start, num_blocks):
            offset = (index - start) * stride
            rows = digests[index * length : (index + 1) * length]  # of the block's prompt tokens
            parent = block_hash(parent, token_bytes[offset : offset + stride], rows)
            hashes.append(parent)
