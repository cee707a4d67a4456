"""Block tables of requests over the block pool, and the prefix cache.

Owns which page holds which block of which request. Knows nothing of slots, budgets or steps.

When is a block's content announced to the prefix cache? As soon as the step that computes its last token is planned
and all its token ids are known. That is early enough for requests planned later in the same step to share it, and
safe: workers execute plans strictly in order, and within a step each layer writes the keys and values of all rows
before its attention reads any. A block that contains a placeholder (a token still being sampled) has no hash yet; it is
announced when the request next grows or is freed, by which time its ids have arrived.
"""

from array import array
from collections.abc import Iterable

from quire.core.kv.block_pool import BlockPool, block_hash, root_hash
from quire.core.scheduling.request import Request
from quire.core.wire.protocol import ROW_DIGEST_BYTES


class KVCacheManager:
    """Gives pages to requests, finds shared prefixes, takes pages back."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_kv_groups: int = 1, enable_prefix_caching: bool = True
    ) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._groups = range(num_kv_groups)
        self._caching = enable_prefix_caching
        self._num_queries = 0
        self._num_hits = 0

    @property
    def usage(self) -> float:
        """Share of pages in use, 0 to 1; cached pages that nobody refers to do not count."""
        return self._pool.num_in_use / self._pool.num_blocks

    @property
    def max_num_tokens(self) -> int:
        """Tokens that one request can hold when it has the pool for itself."""
        return self._pool.num_blocks // len(self._groups) * self._block_size

    def admit(self, request: Request, prefix: list[list[int]], num_spare_pages: int) -> bool:
        """Builds the block table for all known tokens of `request`, starting with the shared pages `prefix`.

        All of a prompt's pages are taken at once, though its chunks may run over several steps: a prompt that would
        not fit is better off waiting than being preempted half-way. False, and nothing changes, when fewer than
        `num_spare_pages` pages would be left.
        """
        num_new = -(-request.num_tokens // self._block_size) - len(prefix[0])
        num_taken = num_new * len(prefix) + sum(self._pool.num_cached_among(pages) for pages in prefix)
        if num_taken + num_spare_pages > self._pool.num_available:
            return False
        for pages in prefix:
            self._pool.share(pages)
        request.block_ids = [pages + self._pool.allocate(num_new) for pages in prefix]
        request.num_cached_blocks = len(prefix[0])
        request.num_planned_tokens = len(prefix[0]) * self._block_size
        self._count_paged_tokens(request)
        if self._caching and not request.num_preemptions:
            self._num_queries += request.num_tokens
            self._num_hits += request.num_planned_tokens
        return True

    def find_prefix(self, request: Request) -> list[list[int]]:
        """Per KV group, the pages that hold the longest cached prefix: equally many, and never the whole sequence.

        At least the last known token must be computed, because the next one is sampled from it. A prompt whose
        log-probabilities are wanted must be computed whole: nobody keeps them.
        """
        prefix: list[list[int]] = [[] for _ in self._groups]
        if not self._caching or request.scores_prompt:
            return prefix
        num_blocks = (request.num_tokens - 1) // self._block_size
        self._hash_blocks(request, num_blocks)
        find = self._pool.find
        for digest in request.block_hashes[:num_blocks]:
            pages = [page for group in self._groups if (page := find((digest, group))) is not None]
            if len(pages) < len(prefix):
                break
            for table, page in zip(prefix, pages, strict=True):
                table.append(page)
        return prefix

    def grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Extends the block table to hold `num_tokens` tokens; the new pages per group, or None if too few are left."""
        num_new = -(-num_tokens // self._block_size) - len(request.block_ids[0])
        if num_new * len(self._groups) > self._pool.num_available:
            return None
        self.cache_full_blocks(request)
        added = [self._pool.allocate(num_new) for _ in self._groups]
        for table, pages in zip(request.block_ids, added, strict=True):
            table.extend(pages)
        self._count_paged_tokens(request)
        return added

    def cache_full_blocks(self, request: Request) -> None:
        """Announces the full blocks of `request` that are planned to be computed and whose token ids are known."""
        if not self._caching:
            return
        start = request.num_cached_blocks
        end = min(request.num_planned_tokens, len(request.token_ids)) // self._block_size
        if end <= start:
            return
        self._hash_blocks(request, end)
        for group, table in enumerate(request.block_ids):
            for index in range(start, end):
                self._pool.name(table[index], (request.block_hashes[index], group))
        request.num_cached_blocks = end

    def free(self, request: Request) -> None:
        """Takes the request's pages back; full ones stay findable.

        The tail goes first, so it is also evicted first: a sequence's head is what others are most likely to share.
        """
        self.cache_full_blocks(request)
        for table in request.block_ids:
            self._pool.release(reversed(table))
        request.block_ids = []
        request.num_cached_blocks = 0
        request.num_planned_tokens = 0
        request.num_paged_tokens = 0

    def disown(self, request: Request) -> None:
        """Makes every block that `request` ever announced unfindable: what it computed is not to be trusted."""
        self._pool.disown((digest, group) for digest in request.block_hashes for group in self._groups)

    def take_counts(self) -> tuple[int, int]:
        """(tokens looked up, tokens found) at first admissions since the last call."""
        counts = self._num_queries, self._num_hits
        self._num_queries = self._num_hits = 0
        return counts

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached page that no request uses; True when that leaves nothing to be found."""
        return self._pool.drop_cached()

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Asserts that pages and the block tables of `requests`, all that exist, account for each other exactly."""
        held = list(requests)
        self._pool.check_invariants([page for request in held for table in request.block_ids for page in table])
        for request in held:
            for table in request.block_ids:
                assert len(set(table)) == len(table), f"{request.request_id} holds a page twice"
                assert request.num_paged_tokens <= len(table) * self._block_size
            assert request.num_planned_tokens <= request.num_paged_tokens, f"{request.request_id} outran its pages"

    def _count_paged_tokens(self, request: Request) -> None:
        # The last token of a request is sampled, never computed; capping here lets the scheduler see both ends, that
        # of the pages and that of the request, with one comparison.
        request.num_paged_tokens = min(len(request.block_ids[0]) * self._block_size, request.max_num_tokens - 1)

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Extends `request.block_hashes` to the first `num_blocks` blocks, whose tokens are known."""
        hashes = request.block_hashes
        size = self._block_size
        start = len(hashes)
        if start >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(request.cache_salt)
        token_bytes = memoryview(array("q", request.token_ids[start * size : num_blocks * size])).cast("B")
        stride = size * 8
        if request.prompt_embeds is None:
            for offset in range(0, len(token_bytes), stride):
                parent = block_hash(parent, token_bytes[offset : offset + stride])
                hashes.append(parent)
            return
        digests, length = request.prompt_embeds.row_digests, size * ROW_DIGEST_BYTES
        for index in range(start, num_blocks):
            offset = (index - start) * stride
            rows = digests[index * length : (index + 1) * length]  # of its tokens that are the prompt's
            parent = block_hash(parent, token_bytes[offset : offset + stride], rows)
            hashes.append(parent)
