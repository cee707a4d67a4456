"""The worker's state of running requests: one row of arrays per slot, changed by step plans.

Token ids live on the device, so that a sampled id can feed the next step before the host has seen it. All other values
are integers in NumPy arrays, which only the host reads while it builds a step. Sampling parameters are columns of the
sampling features that use them (`executor/sampling/`), not of this table.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from quire.core.wire.prefix_spans import PrefixSpan
from quire.core.wire.protocol import NewSlot
from quire.executor.parallel.context.strategy import WHOLE, ContextParallel
from quire.executor.transfers import to_device

_FIRST_COLUMNS = 2048


class RequestTable:
    """Slot-indexed rows of every request that the scheduler has running.

    Attributes:
        token_ids: [max_num_seqs, columns] int32 on the device; known tokens at their positions. Grows by doubling: a
            long context limit costs nothing until a request is that long.
        memory: [max_num_seqs * columns + 2] int32; that of `token_ids`, and two spare places.
        num_prompt_tokens: [max_num_seqs] int32.
        adapters: [max_num_seqs] int64; each request's adapter or -1. None: the worker has no adapters.
        adapter_starts: [max_num_seqs] int64; the first token of each that has the adapter.
        num_unnamed: [max_num_seqs] int32; leading tokens that are given as embeddings and have no valid ids.
        block_tables: per KV group, [max_num_seqs, max_pages] int32; the page that holds positions
            `i * block_size .. (i + 1) * block_size - 1` at column i.
        num_pages: per KV group, [max_num_seqs] int32; pages in use in each row.
        prefix_spans: by slot, of the requests that have some.
        max_seq_len: the tokens for which a row of a block table has room.
        spare_page: a page that no request has.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_kv_groups: int = 1,
        sequences: ContextParallel = WHOLE,
        spare_page: int = 0,
        num_adapters: int = 0,
    ) -> None:
        """Where ranks divide positions, other ranks' tokens are written to `spare_page`."""
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self._sequences = sequences
        self.spare_page = spare_page
        self.device = device
        self._make_columns(min(max_model_len + 1, _FIRST_COLUMNS))
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_unnamed = np.zeros(max_num_seqs, np.int32)
        self.prefix_spans: dict[int, Sequence[PrefixSpan]] = {}
        self._num_adapters = num_adapters
        self.adapters = np.full(max_num_seqs, -1) if num_adapters else None
        self.adapter_starts = np.zeros(max_num_seqs, np.int64)
        max_pages = max_model_len // block_size + 1
        self.max_seq_len = max_pages * block_size
        # The system allocates np.zeros of this size lazily: columns that no request reaches cost no memory.
        self.block_tables = [np.zeros((max_num_seqs, max_pages), np.int32) for _ in range(num_kv_groups)]
        self.num_pages = [np.zeros(max_num_seqs, np.int32) for _ in range(num_kv_groups)]

    def admit(self, request: NewSlot) -> None:
        """Adds the tokens and pages of a request that enters a slot."""
        num_tokens, slot = len(request.token_ids), request.slot
        self.reach(num_tokens + 1)
        self.token_ids[slot, :num_tokens] = to_device(np.array(request.token_ids, np.int32), self.device)
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.prefix_spans.pop(slot, None)
        if request.prefix_spans:
            self.prefix_spans[slot] = request.prefix_spans
        self.num_unnamed[slot] = 0 if request.prompt_embeds is None else request.prompt_embeds.num_rows
        if self.adapters is not None:
            self.adapters[slot] = request.adapter
            self.adapter_starts[slot] = request.adapter_start
        assert request.adapter < self._num_adapters, f"a plan names adapter {request.adapter}, which is not here"
        for num_pages in self.num_pages:
            num_pages[slot] = 0
        self.append_pages(slot, request.page_ids)

    def release(self, slots: list[int]) -> None:
        """Drops the requests in these slots."""
        for num_pages in self.num_pages:
            num_pages[slots] = 0
        for slot in slots if self.prefix_spans else ():
            self.prefix_spans.pop(slot, None)

    def append_pages(self, slot: int, page_ids: Iterable[list[int]]) -> None:
        """Appends new pages, by KV group, to those of the request in `slot`."""
        for table, num_pages, pages in zip(self.block_tables, self.num_pages, page_ids, strict=True):
            first = num_pages[slot]
            table[slot, first : first + len(pages)] = pages
            num_pages[slot] = first + len(pages)

    def adapters_of(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Returns the adapters [n] int64 of the tokens at (slot, position) pairs: [n] and [n].

        -1 for tokens without; None if none has one.
        """
        if self.adapters is None:
            return None
        found = np.where(positions >= self.adapter_starts[slots], self.adapters[slots], -1)
        return found if (found >= 0).any() else None

    def spans_of(self, slots: Sequence[int], starts: Sequence[int]) -> list[Sequence[PrefixSpan]] | None:
        """Returns the prefix spans of rows that compute tokens from `starts` on; None if no such token is in one."""
        if not self.prefix_spans:
            return None
        found = [self.prefix_spans.get(slot, ()) for slot in slots]
        meets = any(spans and start < spans[-1][1] for spans, start in zip(found, starts, strict=True))
        return found if meets else None

    def cache_slots(self, group: int, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns the slots in a KV group's caches of the tokens at (slot, position) pairs: [n], [n] to [n] int64."""
        page, offset = np.divmod(positions, self.block_size)
        pages = self.block_tables[group][slots, page].astype(np.int64)
        return self._sequences.slots(pages, offset, self.block_size, self.spare_page)

    def gather(self, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Token ids at (slot, position) pairs: [n] and [n] to [n] int64 on the device."""
        places = self.places(slots, positions)
        return self.take(places, to_device(places, self.device))

    def places(self, slots: np.ndarray, positions: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Returns the places of the tokens at (slot, position) pairs, valid until the table grows.

        Takes [n] and [n]; returns [n] int64, in `out` if it is given.
        """
        found = np.multiply(slots, self._num_columns, out=out)
        found += positions
        return found

    @property
    def spare_places(self) -> tuple[int, int]:
        """Places of no request, for rows of padding: one to read, which has token 0, and one to write."""
        return len(self.memory) - 2, len(self.memory) - 1

    def take(self, places: np.ndarray, there: torch.Tensor) -> torch.Tensor:
        """Returns the token ids at `places` [n], which are `there` on the device: [n] int64 there."""
        if self._on_host is None:
            return self.token_ids.view(-1)[there].long()
        return torch.from_numpy(self._on_host[places].astype(np.int64))

    def reader(self, places: np.ndarray, out: torch.Tensor) -> Callable[[], None]:
        """Returns a call that reads the ids at `places` [n] into `out` [n] int64, where the device is the host.

        The two stay in place. The call is of NumPy alone: with cold caches, the first call of torch in a step takes a
        hundred microseconds.
        """
        ids = out.numpy()

        def read() -> None:
            assert self._on_host is not None
            ids[:] = self._on_host[places]

        return read

    def write(
        self, slots: np.ndarray, positions: np.ndarray, token_ids: torch.Tensor, there: torch.Tensor | None = None
    ) -> None:
        """Writes `token_ids` [n], on the device, at (slot, position) pairs; the host does not wait for the values.

        `there` are their places on the device, for which the table has columns; None: they are copied there.
        """
        if len(slots) == 0:
            return
        if there is None or self._on_host is not None:
            self.reach(max(positions.tolist()) + 1)  # for a few rows, a fifth of NumPy's time
            index = self.places(slots, positions)
            if self._on_host is not None:
                self._on_host[index] = token_ids.numpy()
                return
            there = to_device(index, self.device)
        self.token_ids.view(-1)[there] = token_ids.int()

    def write_drafts(self, slots: np.ndarray, starts: torch.Tensor, token_ids: torch.Tensor, num_columns: int) -> None:
        """Writes `token_ids` [n, most drafts] after the known tokens of `slots` [n].

        Args:
            starts: [n] int64, on the device as the ids are; the position of each row's first.
            num_columns: more than any draft's position.
        """
        self.reach(num_columns)
        if self._on_host is not None:
            firsts = slots * self._num_columns + starts.numpy()
            self._on_host[firsts[:, None] + np.arange(token_ids.shape[1])] = token_ids.numpy()
            return
        columns = starts.unsqueeze(1) + torch.arange(token_ids.shape[1], device=self.device)
        index = to_device(slots * self._num_columns, self.device).unsqueeze(1) + columns
        self.token_ids.view(-1)[index] = token_ids.int()

    def reach(self, num_columns: int) -> None:
        """Grows `token_ids` until it has at least `num_columns` columns, which changes all places."""
        columns = self._num_columns
        if num_columns <= columns:
            return
        while columns < num_columns:
            columns *= 2
        before = self.token_ids
        self._make_columns(columns)
        self.token_ids[:, : before.shape[1]] = before

    def _make_columns(self, num_columns: int) -> None:
        self._num_columns = num_columns
        num_places = self.max_num_seqs * num_columns
        self.memory = torch.zeros(num_places + 2, dtype=torch.int32, device=self.device)
        self.token_ids = self.memory[:num_places].view(self.max_num_seqs, num_columns)
        # A view of the same memory if the device is the host: for a few ids, NumPy takes a third of torch's time.
        self._on_host = self.memory.numpy() if self.device.type == "cpu" else None
