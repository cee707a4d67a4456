"""Groups one step's rows for attention, once a step, with NumPy; every layer uses the groups.

A layer must not loop over requests, so rows of similar size are padded to one shape and computed together. Prompts are
first cut into pieces of at most `MAX_QUERY_LEN` tokens, which skips most of the masked upper triangle. A group gathers
the pages of all its rows into one workspace, with at most `workspace_bytes` each for keys and for values. It has at
most `max_scores` scores. A single row that exceeds these limits is a separate group.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Places = TypeVar("Places", np.ndarray, Tensor)

MAX_QUERY_LEN = 128
"""The most tokens of one row that share one gathering of its pages."""

WORKSPACE_BYTES = 4 << 20
"""The most bytes of a group's gathered keys: near the size of a core's cache, and enough to amortize a kernel's start.

On an accelerator, where a kernel's start costs the host more, the limit is multiplied by `ACCELERATED`.
"""

MAX_SCORES = 4 << 20
"""The most attention scores (heads * queries * keys) at once, in float32; also multiplied on an accelerator."""

LEAST_HEADS = 4
"""The least number of heads in estimates: positions take as much memory as the scores of one head."""

ACCELERATED = 8

MAX_KEPT_BIAS = 1 << 20
"""The most elements of a bias that a group stores for the next layer; a larger bias is computed in each layer."""

MAX_KEPT_BIASES = 16 << 20
"""The most elements of biases that all groups of a step store."""


def workspace_bytes(device: torch.device) -> int:
    return WORKSPACE_BYTES if device.type == "cpu" else ACCELERATED * WORKSPACE_BYTES


def max_scores(device: torch.device, num_heads: int) -> int:
    """Most scores of one head that exist at once; see `MAX_SCORES`."""
    most = MAX_SCORES if device.type == "cpu" else ACCELERATED * MAX_SCORES
    return most // max(num_heads, LEAST_HEADS)


def scratch_bytes(device: torch.device, row_bytes: int, *, is_quantized: bool) -> int:
    gathered = max(2 * workspace_bytes(device), row_bytes)
    scores = 4 * max_scores(device, LEAST_HEADS) * LEAST_HEADS
    # Dequantization goes through float32. Scores exist twice, and a head's share of them, at most a fourth, exists as
    # positions and biases.
    return (3 if is_quantized else 1) * gathered + 3 * scores + 4 * MAX_KEPT_BIASES


class VisibleRange(NamedTuple):
    """The earlier tokens that a token sees: see `AttentionForm`."""

    window: int | None
    chunk: int | None
    chunks: Literal["own", "previous", "earlier"] = "own"
    span_window: int | None = None

    def first(self, position: np.ndarray | Tensor) -> Any:
        """Returns the first position that a token at `position` sees; with a window, perhaps a negative one."""
        first = 0 * position if self.window is None else position + 1 - self.window
        if self.chunk is not None and self.chunks != "earlier":
            start = position - position % self.chunk - (self.chunk if self.chunks == "previous" else 0)
            first = first + (start - first) * (start > first)
        return first

    def end(self, position: np.ndarray | Tensor) -> Any:
        """Returns the position after the last one that a token at `position` sees; negative if it sees none."""
        if self.chunk is None or self.chunks == "own":
            return position + 1
        return position - position % self.chunk - (self.chunk if self.chunks == "earlier" else 0)

    def of_span(self, position: Places, begin: Places, end: Places) -> tuple[Places, Places]:
        """Returns the first position of its span that a token at `position` sees, and the one after the last."""
        if self.span_window is None:
            return begin, end
        reach = self.span_window
        return begin.clip(position + 1 - reach), end.clip(None, position + reach)


@dataclass(frozen=True)
class Pieces:
    """A table of pieces: runs of new tokens of one row. Each field is a column, [num_pieces]."""

    row: np.ndarray
    first_token: np.ndarray  # flat index of the first query
    query_len: np.ndarray
    end: np.ndarray  # tokens of the row up to the piece's last query, itself included
    prefix_begin: np.ndarray  # the row's tokens from here up to `prefix_end` see each other
    prefix_end: np.ndarray

    def take(self, index: np.ndarray) -> "Pieces":
        columns = (self.row, self.first_token, self.query_len, self.end, self.prefix_begin, self.prefix_end)
        return Pieces(*(column[index] for column in columns))

    @property
    def start(self) -> np.ndarray:
        """The position of each piece's first query."""
        return self.end - self.query_len

    @property
    def prefix(self) -> np.ndarray:
        """Where each piece's prefix span begins and ends, [2, num_pieces]."""
        return np.stack((self.prefix_begin, self.prefix_end))

    @property
    def meets_prefix(self) -> np.ndarray:
        """True for pieces with a query in a prefix span."""
        return (self.start < self.prefix_end) & (self.end > self.prefix_begin)

    @property
    def reach(self) -> np.ndarray:
        """Tokens of the row up to the last one that a query sees without a limit."""
        return np.where(self.meets_prefix, np.maximum(self.end, self.prefix_end), self.end)

    def first_key(self, visible: VisibleRange) -> np.ndarray:
        """The first position that a query of each piece sees."""
        start, first = self.start, visible.first(self.start)
        is_inside = (self.prefix_begin <= start) & (start < self.prefix_end)
        first_of_span, _ = visible.of_span(start, self.prefix_begin, self.prefix_end)
        return np.maximum(np.where(is_inside, np.minimum(first, first_of_span), first), 0)


@dataclass
class Group:
    """Pieces computed together: R rows of up to Q queries over L keys; L is a multiple of the page size."""

    num_rows: int
    query_len: int
    key_len: int
    pages: Tensor  # [R * pages a row] int64
    tokens: slice | Tensor  # the queries' flat indices, R * Q of them; short rows repeat their last query
    valid: Tensor | None  # indices into R * Q of the queries that are not padding; None: all
    targets: Tensor | None  # flat indices for the results of `valid`; None: `tokens`
    query_positions: Tensor  # [R, Q] int64
    key_positions: Tensor  # [R, L] int64
    unseen: Tensor | None  # indices into R * L of keys that none of a row's queries sees; None: there are none
    prefix: (
        Tensor | None
    )  # [2, R] int64: where spans of tokens that see each other begin and end; None: no query is in one
    visible: VisibleRange
    sees_all: bool  # every query sees every key
    keeps_bias: bool  # for the next layer
    _bias: Tensor | None = field(default=None, repr=False)
    _heads: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def heads_of_pages(self, num_kv_heads: int) -> Tensor:
        """[2 * num_kv_heads * R * pages a row] int64: where each head's keys of a page lie, then each head's values.

        A cache has the keys of all heads of a page, then the values of all.
        """
        if num_kv_heads not in self._heads:
            heads = torch.arange(2 * num_kv_heads, device=self.pages.device).unsqueeze(1)
            self._heads[num_kv_heads] = (heads + self.pages * (2 * num_kv_heads)).view(-1)
        return self._heads[num_kv_heads]

    @property
    def query_tokens(self) -> Tensor:
        """[R * Q] int64: the queries' flat indices."""
        if isinstance(self.tokens, Tensor):
            return self.tokens
        return torch.arange(self.tokens.start, self.tokens.stop, device=self.pages.device)

    def clear_unseen(self, numbers: Tensor) -> Tensor:
        """Zeros the elements of `numbers` [.. * R, L, size], rows of the group's pages, that no query sees.

        They may be any bytes, because a page may have served another kind of layer. An infinity or NaN would stay:
        neither adding -inf to a score nor a weight of 0 hides it.
        """
        if self.unseen is not None:
            numbers.view(-1, self.num_rows * self.key_len, numbers.shape[-1]).index_fill_(1, self.unseen, 0)
        return numbers

    def bias(self, begin: int, end: int) -> Tensor | None:
        """Returns [R, 1, end - begin, L] float32 for queries `begin:end`: 0 for keys that a query sees, -inf for the
        others.

        None if every query sees every key.
        """
        if self.sees_all:
            return None
        if not self.keeps_bias:
            return self._make_bias(begin, end)
        if self._bias is None:
            self._bias = self._make_bias(0, self.query_len)
        return self._bias[:, :, begin:end]

    def distances(self, begin: int, end: int) -> Tensor:
        """[R, 1, end - begin, L] float32 for queries `begin:end`: each key's position less the query's."""
        queries, keys = self.query_positions[:, begin:end].unsqueeze(2), self.key_positions.unsqueeze(1)
        return (keys - queries).float().unsqueeze(1)

    def _make_bias(self, begin: int, end: int) -> Tensor:
        queries, keys = self.query_positions[:, begin:end].unsqueeze(2), self.key_positions.unsqueeze(1)
        seen = self.visible.end(queries)
        first = self.visible.first(queries)
        if self.prefix is not None:
            begins, ends = self.prefix.view(2, -1, 1, 1).unbind()
            is_inside = (begins <= queries) & (queries < ends)
            first_of_span, end_of_span = self.visible.of_span(queries, begins, ends)
            seen = torch.where(is_inside, end_of_span, seen)
            first = torch.where(is_inside, torch.minimum(first, first_of_span), first)
        hidden = keys >= seen
        if self.visible.window is not None or self.visible.chunk is not None:
            hidden |= keys < first
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf")).unsqueeze(1)


class AttentionPlan:
    """One step's rows, and their groups for each visible range of a layer.

    Groups are formed when the first layer asks, because the cache's shape is known there.
    """

    def __init__(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_tables: np.ndarray,
        slot_mapping: Tensor,
        block_size: int,
        prefix_spans: np.ndarray | None = None,
    ) -> None:
        self.slot_mapping = slot_mapping
        self.query_lens = query_lens
        self.seq_lens = seq_lens
        self.block_tables = block_tables
        self.block_size = block_size
        self.prefix_spans = prefix_spans
        self._device = slot_mapping.device
        self._groups: dict[tuple[VisibleRange, int, int], list[Group]] = {}
        self._num_kept = 0

    @cached_property
    def positions(self) -> np.ndarray | None:
        ends = np.cumsum(self.query_lens)
        return np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.seq_lens - ends, self.query_lens)

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max(initial=0))

    @cached_property
    def tables_there(self) -> Tensor:
        return self._send(self.block_tables)

    @cached_property
    def _pieces(self) -> Pieces:
        spans = self.prefix_spans
        return _cut(
            self.query_lens, self.seq_lens, np.zeros((len(self.query_lens), 2), np.int64) if spans is None else spans
        )

    @property
    def meets_prefix(self) -> bool:
        """True if a new token of the step is in a prefix span."""
        return self.prefix_spans is not None and bool(self._pieces.meets_prefix.any())

    def groups(self, visible: VisibleRange, num_heads: int, page_bytes: int) -> list[Group]:
        """Returns groups that together contain each query once; `page_bytes` is the size of one page's keys once read.

        Raises:
            ValueError: chunks, and tokens that see later ones.
        """
        if self.meets_prefix and visible.chunk is not None:
            raise ValueError("a prefix span, whose tokens see each other, is not there for attention in chunks")
        key = (visible, num_heads, page_bytes)
        if key not in self._groups:
            self._groups[key] = [self._group(part, visible) for part in self._split(*key)]
        return self._groups[key]

    def _split(self, visible: VisibleRange, num_heads: int, page_bytes: int) -> Iterator[Pieces]:
        """Sets of pieces of similar size, each within the limits on workspace and scores."""
        pieces = self._pieces
        num_pages = self._last_page(pieces, visible) - self._first_page(pieces, visible) + 1
        order = np.lexsort((num_pages, pieces.query_len))[::-1]
        begin = 0
        while begin < len(order):
            first = order[begin]
            queries, pages = int(pieces.query_len[first]), int(num_pages[first])
            by_workspace = workspace_bytes(self._device) // (pages * page_bytes)
            by_scores = max_scores(self._device, num_heads) // (queries * pages * self.block_size)
            candidates = order[begin : begin + max(1, min(by_workspace, by_scores))]
            similar = (
                (pieces.query_len[candidates] * 4 >= queries * 3)
                & (num_pages[candidates] <= pages)
                & (num_pages[candidates] * 4 + 16 >= pages * 3)
            )
            count = len(candidates) if similar.all() else int(similar.argmin())
            # Sorted by their tokens, so that a step of decodes needs no reordering.
            yield pieces.take(np.sort(order[begin : begin + count]))
            begin += count

    def _first_page(self, pieces: Pieces, visible: VisibleRange) -> np.ndarray:
        return pieces.first_key(visible) // self.block_size

    def _last_page(self, pieces: Pieces, visible: VisibleRange) -> np.ndarray:
        """At least the first one, also for a piece that sees no key."""
        return np.maximum((visible.end(pieces.reach - 1) - 1) // self.block_size, self._first_page(pieces, visible))

    def _group(self, pieces: Pieces, visible: VisibleRange) -> Group:
        first_page, last_page = self._first_page(pieces, visible), self._last_page(pieces, visible)
        num_pages = int((last_page - first_page).max()) + 1
        # Shorter rows repeat their last page. No query sees the repetitions: their positions are past all that it sees.
        page_index = np.minimum(first_page[:, None] + np.arange(num_pages), last_page[:, None])
        pages = self.block_tables[pieces.row[:, None], page_index]

        key_start = first_page * self.block_size
        # Not cut within a page: a batched product of half-precision matrices is many times slower on a slice.
        key_len = num_pages * self.block_size
        key_positions = key_start[:, None] + np.arange(key_len)
        unseen = np.flatnonzero(key_positions >= pieces.reach[:, None])
        query_len = int(pieces.query_len.max())
        offsets = np.arange(query_len)
        is_valid = offsets < pieces.query_len[:, None]
        clipped = np.minimum(offsets, pieces.query_len[:, None] - 1)
        tokens = (pieces.first_token[:, None] + clipped).ravel()
        padded = not is_valid.all()
        in_sequence = not padded and int(tokens[-1] - tokens[0]) + 1 == len(tokens)
        valid = np.flatnonzero(is_valid) if padded else None
        sees_all = query_len == 1 and visible == VisibleRange(None, None) and bool((pieces.reach == key_len).all())
        num_biases = 0 if sees_all else len(pieces.row) * query_len * key_len
        keeps_bias = num_biases <= min(MAX_KEPT_BIAS, MAX_KEPT_BIASES - self._num_kept)
        self._num_kept += num_biases * keeps_bias
        return Group(
            num_rows=len(pieces.row),
            query_len=query_len,
            key_len=key_len,
            pages=self._send(pages.ravel()),
            tokens=slice(int(tokens[0]), int(tokens[-1]) + 1) if in_sequence else self._send(tokens),
            valid=None if valid is None else self._send(valid),
            targets=None if valid is None else self._send(tokens[valid]),
            query_positions=self._send(pieces.start[:, None] + clipped),
            key_positions=self._send(key_positions),
            unseen=self._send(unseen) if len(unseen) else None,
            prefix=self._send(np.stack((pieces.prefix_begin, pieces.prefix_end)))
            if pieces.meets_prefix.any()
            else None,
            visible=visible,
            sees_all=sees_all,
            keeps_bias=keeps_bias,
        )

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device, non_blocking=True)


def _cut(query_lens: np.ndarray, seq_lens: np.ndarray, prefix_spans: np.ndarray) -> Pieces:
    """Rows cut into pieces of at most MAX_QUERY_LEN queries, in token order."""
    first_token = np.cumsum(query_lens) - query_lens
    rows = np.arange(len(query_lens))
    if query_lens.max() <= MAX_QUERY_LEN:
        return Pieces(rows, first_token, query_lens, seq_lens, *prefix_spans.T)
    counts = -(-query_lens // MAX_QUERY_LEN)
    row = np.repeat(rows, counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = nth * MAX_QUERY_LEN
    length = np.minimum(query_lens[row] - begin, MAX_QUERY_LEN)
    end = seq_lens[row] - query_lens[row] + begin + length
    return Pieces(row, first_token[row] + begin, length, end, *prefix_spans[row].T)
