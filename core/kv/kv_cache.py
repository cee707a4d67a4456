"""Block tables of requests over the page pool, and the prefix cache.

Owns the map from requests' blocks to pages. Knows nothing of slots, budgets or steps.

The states of recurrent layers lie in the workers' slots, not in pages; only their snapshots do (`snapshots.py`).

A block is announced to the prefix cache as soon as the step that computes its last token is planned and all its token
ids are known. Requests planned later in the same step can therefore share it. Sharing is safe, because workers execute
plans strictly in order, and within a step each layer writes the keys and values of all rows before its attention reads
any. A block that contains a placeholder (a token still being sampled) has no hash yet. It is announced when the request
next grows or is freed; its ids have arrived by then.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from quire.core.kv.block_hashes import BlockHasher
from quire.core.kv.block_table import BlockTable, CachedPrefix
from quire.core.kv.encoded_pages import EncodedPages
from quire.core.kv.groups import KVGroup, make_groups
from quire.core.kv.page_loads import LowerTiers, PageLoad, PageLoads
from quire.core.kv.page_pool import PageKey, PagePool
from quire.core.kv.paged_request import PagedRequest, PlannedSnapshot
from quire.core.kv.snapshots import Snapshots
from quire.core.wire.kv_groups import KVGroupSpec, shares_prefixes
from quire.core.wire.page_moves import PageMove
from quire.core.wire.prefix_spans import span_around

_Has = Callable[[PageKey], bool]
"""A test whether the content of a key is there."""


class KVCacheManager:
    """Allocates pages to requests, finds shared prefixes, and releases pages.

    Args:
        kv_groups: the model's KV groups; a request has a block table in each that `KVGroupSpec.has_block_table`.
        num_pages: pages of the pool, any of which may serve any group.
        block_size: tokens of a page.
        largest_chunk: the most tokens of a request that one step computes.
        enable_prefix_caching: whether full pages stay findable when no request uses them.
        num_lookahead_tokens: places past its planned tokens that a request holds.
        hash_algorithm: what names the content of full pages; see `hash_functions.py`.
        lower_tiers: save pages that the pool evicts; None: their content is lost.
    """

    def __init__(
        self,
        kv_groups: Sequence[KVGroupSpec],
        *,
        num_pages: int,
        block_size: int,
        largest_chunk: int,
        num_lookahead_tokens: int = 0,
        enable_prefix_caching: bool = True,
        hash_algorithm: str = "sha256",
        lower_tiers: LowerTiers | None = None,
    ) -> None:
        self._pool = PagePool(num_pages)
        self._block_size = block_size
        self._num_lookahead_tokens = num_lookahead_tokens
        self._hasher = BlockHasher(block_size, hash_algorithm)
        paged = [group for group in kv_groups if group.has_block_table]
        self._groups = make_groups(paged, block_size=block_size, largest_chunk=largest_chunk + num_lookahead_tokens)
        self._snapshots: Snapshots | None = None
        self._caching = enable_prefix_caching and shares_prefixes(kv_groups)
        self._encoded = EncodedPages(
            self._pool,
            self._hasher,
            num_groups=sum(group.is_cross for group in kv_groups),
            block_size=block_size,
            first_group=len(paged),
            caching=enable_prefix_caching,
        )
        if self._caching and kv_groups[-1].is_recurrent:
            self._snapshots = _snapshots(self._pool, kv_groups[-1], block_size=block_size, first_group=len(paged))
        # Groups that see farthest come first: they stop at the first missing block, which saves the others look-ups.
        by_reach = sorted(enumerate(self._groups), key=lambda entry: entry[1].first_needed_block(sys.maxsize))
        self._searches: list[Callable[[list[bytes], int, _Has], int]] = [
            partial(_longest_prefix, group, index) for index, group in by_reach
        ]
        if self._snapshots is not None:
            self._searches.append(self._snapshots.longest_prefix)
        self._loads: PageLoads | None = None
        if lower_tiers is not None:
            self._loads = PageLoads(self._pool, lower_tiers)
            self._pool.on_evict = self._on_evict
        self._num_queries = 0
        self._num_hits = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._pool.num_pages

    @property
    def usage(self) -> float:
        """Share of pages in use, 0 to 1; cached pages that no block table refers to do not count."""
        return self._pool.num_in_use / max(1, self._pool.num_pages)

    def max_pages(self, num_tokens: int, num_encoder_rows: int = 0) -> int:
        """Pages that a request holds at its worst moment, when it ends with `num_tokens` tokens computed.

        Args:
            num_encoder_rows: of its encoder input.
        """
        pages = sum(group.max_pages(num_tokens + self._num_lookahead_tokens) for group in self._groups)
        return pages + self._encoded.num_pages(num_encoder_rows)

    def admit(self, request: PagedRequest, prefix: CachedPrefix, num_tokens: int, *, num_running: int) -> bool:
        """Builds the block tables of `request` for its first `num_tokens` tokens, those of `prefix` included.

        Returns False and changes nothing when the pool cannot hold all known tokens of the request and one more block
        for each of `num_running` requests: the first of those to grow would preempt the newcomer.
        """
        num_held = sum(len(table.pages) for table in prefix.tables)
        num_taken = self.max_pages(request.num_tokens) - num_held
        num_taken += sum(self._pool.num_cached_among(table.pages) for table in prefix.tables)
        num_taken += self._encoded.num_taken(request, prefix.encoded)
        if num_taken + num_running * len(self._groups) > self._pool.num_available:
            return False
        for table in prefix.tables:
            self._pool.share(table.pages)
        self._pool.touch(prefix.snapshot)
        self._encoded.admit(request, prefix.encoded)
        request.block_tables = prefix.tables
        request.num_cached_blocks = prefix.num_blocks
        request.num_planned_tokens = prefix.num_blocks * self._block_size
        added = self.grow(request, num_tokens)
        assert added is not None, "a group took more pages than it said at most"
        if self._caching and not request.num_preemptions:
            self._num_queries += request.num_tokens
            self._num_hits += request.num_planned_tokens
        return True

    def find_prefix(self, request: PagedRequest) -> CachedPrefix:
        """The longest prefix that every group can continue from.

        The prefix is never the whole sequence: at least the last known token must be computed, because the next one is
        sampled from its logits. A request may also ask for no prefix, and a prompt that is scored
        has none, because the cache keeps no log-probabilities.
        """
        encoded = None if request.skips_prefix_cache else self._encoded.find(request)
        if not self._caching or request.skips_prefix_cache:
            return CachedPrefix(0, [BlockTable(group) for group in self._groups], [], encoded)
        hashes = request.block_hashes
        self._hasher.extend(request, self._num_findable(request))
        num_blocks = self._longest(request, self._pool.has)
        tables = []
        for index, group in enumerate(self._groups):
            first = group.first_needed_block(num_blocks * self._block_size)
            keys = [(digest, index) for digest in hashes[first:num_blocks]]
            tables.append(BlockTable(group, first, self._pool.pages_of(keys)))
        snapshot = [] if self._snapshots is None else self._snapshots.keys_after(hashes, num_blocks)
        return CachedPrefix(num_blocks, tables, self._pool.pages_of(snapshot), encoded)

    def _num_findable(self, request: PagedRequest) -> int:
        """The most blocks of a prefix: the last token is always computed."""
        return (request.num_tokens - 1) // self._block_size

    def _longest(self, request: PagedRequest, has: _Has) -> int:
        """The longest prefix that every group and snapshot can continue from, and that ends in no prefix span."""
        num_blocks = self._num_findable(request)
        while True:
            num_blocks = self._longest_of_groups(request.block_hashes, num_blocks, has)
            span = span_around(request.prompt.prefix_spans, num_blocks * self._block_size)
            if span is None:
                return num_blocks
            num_blocks = span[0] // self._block_size

    def _longest_of_groups(self, hashes: list[bytes], num_blocks: int, has: _Has) -> int:
        """The longest prefix, up to `num_blocks`, that every group and snapshot can continue from."""
        num_agreed = 0  # groups in a row that can continue after `num_blocks` blocks
        for longest_prefix in itertools.cycle(self._searches):
            longest = longest_prefix(hashes, num_blocks, has)
            num_agreed = num_agreed + 1 if longest == num_blocks else 1
            num_blocks = longest
            if num_agreed == len(self._searches):
                break
        return num_blocks

    def load(self, request: PagedRequest, prefix: CachedPrefix, *, num_running: int) -> PageLoad | None:
        """Starts a load by which `request` will find more than `prefix`, or joins one that is underway.

        Returns None if lower tiers have no more, or if the pool lacks the room. A request that has started a load
        since it came or was preempted starts no other: should its pages be evicted again, it computes their tokens.
        """
        if self._loads is None or request.has_loaded or not self._caching or request.skips_prefix_cache:
            return None
        hashes = request.block_hashes
        num_blocks = self._longest(request, self._loads.has)
        if num_blocks <= prefix.num_blocks:
            return None
        keys = [] if self._snapshots is None else self._snapshots.keys_after(hashes, num_blocks)
        for index, group in enumerate(self._groups):
            first = group.first_needed_block(num_blocks * self._block_size)
            keys += [(digest, index) for digest in hashes[first:num_blocks]]
        load = self._loads.underway(keys)
        if load is None:
            load = self._loads.start(keys, num_running * len(self._groups))
            request.has_loaded = load is not None
        return load

    @property
    def is_loading(self) -> bool:
        """True while a load is in flight."""
        return bool(self._loads)

    def finish_move(self, move_id: int) -> PageLoad | None:
        """Takes in that a move is done. Returns the load that ends with it, if one does."""
        assert self._loads is not None, "there are no moves with ids without lower tiers"
        return self._loads.finish(move_id)

    def take_moves(self) -> list[PageMove]:
        """Returns the moves of saves and loads since the last call, for the plan that is being built."""
        if self._loads is None:
            return []
        moves, self._loads.moves = self._loads.moves, []
        return moves

    def _on_evict(self, page: int, key: PageKey) -> None:
        if self._loads is not None and not Snapshots.is_planned(key):
            self._loads.save(page, key)

    @property
    def has_snapshots(self) -> bool:
        """True if a prefix can end only where a snapshot was taken, not after any block."""
        return self._snapshots is not None

    def next_border(self, num_tokens: int) -> int:
        """The number of tokens, more than `num_tokens`, at which a snapshot is due; a huge one if there are none."""
        return sys.maxsize if self._snapshots is None else self._snapshots.next_border(num_tokens)

    def take_snapshot(self, request: PagedRequest, num_tokens: int) -> PlannedSnapshot | None:
        """Plans a snapshot of `request` after `num_tokens` tokens; None if none is due or possible. Call it after
        `grow` or `admit`."""
        snapshot = None if self._snapshots is None else self._snapshots.take_snapshot(request, num_tokens)
        if snapshot is not None:
            request.pages_settled_until = min(request.pages_settled_until, num_tokens)  # the next plan announces it
        return snapshot

    def has_pages(self, snapshot: PlannedSnapshot) -> bool:
        """Returns True if `snapshot` still has all its pages."""
        return self._snapshots is not None and self._snapshots.has_pages(snapshot)

    def is_underway(self, request: PagedRequest, prefix: CachedPrefix, running: Iterable[PagedRequest]) -> bool:
        """Returns True if a running request computes the block by which `request` would find more than `prefix`.

        The scheduler lets such a request wait, so that a shared prompt is computed once.
        """
        size = self._block_size
        end = (prefix.num_blocks + 1) * size
        if self._snapshots is not None:
            end = self._snapshots.next_border(prefix.num_blocks * size)
        num_blocks = end // size
        if num_blocks > len(request.block_hashes):
            return False
        digest = request.block_hashes[num_blocks - 1]
        return any(
            num_blocks <= len(other.block_hashes)
            and other.block_hashes[num_blocks - 1] == digest
            and (other.num_planned_tokens < end or num_blocks in [each.num_blocks for each in other.planned_snapshots])
            for other in running
        )

    def grow(self, request: PagedRequest, num_tokens: int) -> list[list[int]] | None:
        """Releases pages that no uncomputed token sees, and allocates the pages for `num_tokens` tokens.

        Returns the new pages per group. Returns None if too few are left: then pages were released and none allocated.
        Steps in flight may still read released pages. The plan being built must not: call this before the request's row
        is planned.
        """
        self._announce(request)  # first, so that pages given back can be found
        pool, tables = self._pool, request.block_tables
        position, num_known = request.num_computed_tokens, request.num_tokens  # nothing before `position` comes again
        end = num_tokens + self._num_lookahead_tokens
        num_missing = []
        for table in tables:
            first = table.group.first_needed_block(position)
            if first > table.first:
                pool.release(table.drop_before(first))
            num_missing.append(max(0, table.group.num_blocks(num_known, end) - table.end))
        if sum(num_missing) > pool.num_available:
            return None
        added = [pool.allocate(count) for count in num_missing]
        for table, pages in zip(tables, added, strict=True):
            table.pages += pages
        request.pages_settled_until = min(
            [
                num_tokens if request.planned_snapshots else self.next_border(num_tokens) - 1,
                *[self._settled_until(table) for table in tables],
            ]
        )
        return added

    def _settled_until(self, table: BlockTable) -> int:
        """Tokens that can be planned, one a step, before `table` changes."""
        return table.group.settled_until(table.first, table.end) - self._num_lookahead_tokens

    def _announce(self, request: PagedRequest) -> None:
        """Announces the full blocks of `request`, and the snapshots that earlier plans took of it."""
        self.cache_full_blocks(request)
        if self._snapshots is not None:
            self._snapshots.announce(request, request.num_cached_blocks)

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
        self._hasher.extend(request, end)
        for index, table in enumerate(request.block_tables):
            for block in range(max(start, table.first), end):
                self._pool.name(table.pages[block - table.first], (request.block_hashes[block], index))
        request.num_cached_blocks = end

    def free(self, request: PagedRequest) -> None:
        """Releases the request's pages; full ones stay findable.

        The tail is released first, and so evicted first: others are most likely to share a sequence's head.
        """
        self._announce(request)
        if self._snapshots is not None:
            self._snapshots.forget(request)
        blocks = itertools.zip_longest(*(reversed(table.pages) for table in request.block_tables))
        self._pool.release(page for pages in blocks for page in pages if page is not None)
        self._encoded.free(request)
        request.block_tables = []
        request.num_cached_blocks = 0
        request.num_planned_tokens = 0
        request.pages_settled_until = 0

    def disown(self, request: PagedRequest) -> None:
        """Makes every block that `request` announced unfindable, because its keys and values cannot be trusted."""
        hashes = request.block_hashes
        keys = [(digest, group) for digest in hashes for group in range(len(self._groups))]
        self._encoded.disown(request)
        self._pool.disown(keys)
        if self._snapshots is not None:
            self._snapshots.disown(hashes)
        if self._loads is not None:
            if self._snapshots is not None:
                keys += [key for end in range(1, len(hashes) + 1) for key in self._snapshots.keys_after(hashes, end)]
            self._loads.forget(keys)

    @property
    def prefix_cache_counts(self) -> tuple[int, int]:
        """(tokens looked up, tokens found) at all first admissions."""
        return self._num_queries, self._num_hits

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached page that no request uses; True when no page is findable any more."""
        if self._loads is not None:
            self._loads.clear()
        return self._pool.drop_cached()

    def check_invariants(self, requests: Iterable[PagedRequest]) -> None:
        """Asserts that pages and the block tables of `requests`, all that exist, account for each other exactly."""
        held = list(requests)
        loading = [] if self._loads is None else self._loads.held_pages
        encoded = [pages for request in held if request.encoded is not None for pages in request.encoded.page_ids]
        tables = [table.pages for request in held for table in request.block_tables]
        self._pool.check_invariants([*itertools.chain(*tables, *encoded), *loading])
        for request in held:
            name, num_computed = request.request_id, request.num_computed_tokens
            for group, table in zip(self._groups, request.block_tables, strict=bool(request.block_tables)):
                assert table.group is group, f"{name} has the block table of another KV group"
                assert len(set(table.pages)) == len(table.pages), f"{name} holds a page twice"
                end = request.num_planned_tokens + self._num_lookahead_tokens
                assert not request.num_planned_tokens or end <= table.end * self._block_size, f"{name} outran its pages"
                assert table.first <= group.first_needed_block(num_computed), f"{name} gave back a page that it needs"
                settled_until = self._settled_until(table)
                assert request.pages_settled_until <= settled_until, f"{name} would overlook that its pages must change"
            if not request.num_planned_tokens:
                assert not request.planned_snapshots, f"{name} has snapshots of nothing"
            if request.planned_snapshots:
                assert request.num_planned_tokens >= request.pages_settled_until, f"{name} would hide a snapshot"
            elif request.num_planned_tokens:
                border = self.next_border(request.num_planned_tokens)
                assert request.pages_settled_until < border, f"{name} would overlook that a snapshot is due"


def _longest_prefix(group: KVGroup, index: int, hashes: list[bytes], num_blocks: int, has: _Has) -> int:
    """The longest prefix of the sequence with `hashes` after which the `index`-th group can continue."""
    return group.longest_prefix(lambda block: has((hashes[block], index)), num_blocks)


def _snapshots(pool: PagePool, group: KVGroupSpec, *, block_size: int, first_group: int) -> Snapshots:
    """The snapshots of a recurrent `group` with an interval.

    Raises:
        ValueError: they are not taken at the ends of blocks.
    """
    assert group.interval is not None
    if group.interval % block_size:
        raise ValueError(f"snapshots every {group.interval} tokens do not end with blocks of {block_size} tokens")
    return Snapshots(
        pool,
        num_pages=group.snapshot_pages,
        interval=group.interval // block_size,
        block_size=block_size,
        first_group=first_group,
    )
