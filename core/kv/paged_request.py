"""A request as the KV cache sees it: its tokens, and the pages that hold their keys and values."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.core.kv.block_table import BlockTable
from quire.core.wire.adapters import Adapter
from quire.core.wire.encoder_input import EncodedInput, EncoderInput
from quire.core.wire.media import MediaItem
from quire.core.wire.page_moves import PageMove
from quire.core.wire.prefix_spans import PrefixSpan
from quire.core.wire.protocol import PromptEmbeds


class PagedPrompt(Protocol):
    """The attributes of a prompt that the KV cache reads and writes. Several sequences may share one."""

    block_hashes: list[bytes]
    root_hash: bytes

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def adapter(self) -> Adapter | None: ...

    @property
    def adapter_start(self) -> int: ...

    @property
    def embeds(self) -> PromptEmbeds | None: ...

    @property
    def encoder(self) -> EncoderInput | None: ...

    @property
    def prefix_spans(self) -> Sequence[PrefixSpan]: ...

    @property
    def media(self) -> Sequence[MediaItem]: ...


class PlannedSnapshot(NamedTuple):
    """A snapshot of a request's recurrent state that a plan takes, and that the cache cannot find yet.

    Attributes:
        num_blocks: leading blocks of the request, after which the snapshot is taken.
        name: replaces their hash in the pool.
        pages: where the copy goes.
    """

    num_blocks: int
    name: bytes
    pages: list[int]

    def move_from(self, slot: int) -> PageMove:
        """Returns the move that takes the snapshot of the state in `slot`."""
        return PageMove("state", [slot], "device", self.pages)


class PagedRequest(Protocol):
    """The attributes of a request that the KV cache reads and writes; `scheduling/request.py` explains each count."""

    num_tokens: int
    num_planned_tokens: int
    num_preemptions: int
    block_tables: list[BlockTable]
    encoded: EncodedInput | None
    block_hashes: list[bytes]
    num_cached_blocks: int
    pages_settled_until: int
    planned_snapshots: list[PlannedSnapshot]
    has_loaded: bool

    @property
    def request_id(self) -> str: ...

    @property
    def prompt(self) -> PagedPrompt: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_known_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def skips_prefix_cache(self) -> bool: ...

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions `start` to `end`."""
