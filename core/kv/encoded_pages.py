"""The pages with the keys and values of encoder inputs, which decoders attend to.

A worker writes them once, in the step that admits a request, and no step changes them. So requests with the same input
share them: the sequences of one request, the beams of a search, and later requests while the prefix cache has all of
them. An input's rows depend on all of it, so some of its pages are of no use.
"""

from array import array
from collections.abc import Sequence

from quire.core.kv.block_hashes import BlockHasher
from quire.core.kv.page_pool import PageKey, PagePool
from quire.core.kv.paged_request import PagedRequest
from quire.core.wire.encoder_input import EncodedInput

EncodedTables = list[list[int]]
"""Per KV group of the kind "cross", the pages of one encoder input."""


class EncodedPages:
    """Takes pages of `pool` for encoder inputs, and finds those that have been written.

    Args:
        num_groups: KV groups of the kind "cross".
        first_group: the number by which the first group's pages are named in the pool.
        caching: whether pages can be found.
    """

    def __init__(
        self, pool: PagePool, hasher: BlockHasher, *, num_groups: int, block_size: int, first_group: int, caching: bool
    ) -> None:
        self._pool = pool
        self._hasher = hasher
        self._block_size = block_size
        self._groups = range(first_group, first_group + num_groups)
        self._caching = caching

    def num_pages(self, num_rows: int) -> int:
        """Pages of an input with `num_rows` rows, in all groups."""
        return len(self._groups) * -(-num_rows // self._block_size)

    def find(self, request: PagedRequest) -> EncodedTables | None:
        """The pages that hold the request's encoder input; None if it has to be encoded, or if there is none."""
        if not self._caching or request.prompt.encoder is None:
            return None
        keys = self._keys(request)
        if not all(self._pool.has(key) for group in keys for key in group):
            return None
        return [self._pool.pages_of(group) for group in keys]

    def num_taken(self, request: PagedRequest, found: EncodedTables | None) -> int:
        """The number by which `admit` lowers the pages that are available."""
        if found is None:
            return 0 if request.prompt.encoder is None else self.num_pages(request.prompt.encoder.num_rows)
        return sum(self._pool.num_cached_among(pages) for pages in found)

    def admit(self, request: PagedRequest, found: EncodedTables | None) -> None:
        """Gives a request the pages that were `found` for it, or new ones, which the plan being made writes."""
        encoder = request.prompt.encoder
        if encoder is None:
            return
        if found is not None:
            for pages in found:
                self._pool.share(pages)
            request.encoded = EncodedInput(encoder.num_rows, found)
            return
        count = -(-encoder.num_rows // self._block_size)
        tables = [self._pool.allocate(count) for _ in self._groups]
        if self._caching:
            for pages, keys in zip(tables, self._keys(request), strict=True):
                for page, key in zip(pages, keys, strict=True):
                    self._pool.name(page, key)
        request.encoded = EncodedInput(encoder.num_rows, tables, encoder)

    def free(self, request: PagedRequest) -> None:
        """Releases the request's pages; they stay findable."""
        if request.encoded is not None:
            for pages in request.encoded.page_ids:
                self._pool.release(reversed(pages))
            request.encoded = None

    def disown(self, request: PagedRequest) -> None:
        """Makes the pages of the request's input unfindable."""
        if request.prompt.encoder is not None:
            for keys in self._keys(request):
                self._pool.disown(keys)

    def _keys(self, request: PagedRequest) -> Sequence[list[PageKey]]:
        """The keys of the pages, per group. They differ from all hashes of blocks by what follows the digest."""
        encoder = request.prompt.encoder
        assert encoder is not None
        digest = self._hasher.root(request.prompt)
        numbers = range(-(-encoder.num_rows // self._block_size))
        names = [digest + b"encoded" + array("q", [number]).tobytes() for number in numbers]
        return [[(name, group) for name in names] for group in self._groups]
