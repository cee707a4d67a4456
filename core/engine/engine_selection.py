"""Selects one of a frontend's engines for each request."""

from collections.abc import Sequence
from typing import Protocol

from quire.core.engine.engine_link import EngineLink
from quire.core.routing.prompt_blocks import prompt_blocks
from quire.core.routing.router import FULL, Router, RoutingRules
from quire.core.wire.protocol import EngineReady, EngineRequest


class EngineSelector(Protocol):
    """Chooses engines for prompts, and hears of changes in their loads and caches."""

    def blocks(self, request: EngineRequest) -> list[int]:
        """The names of a prompt's blocks, which the other calls take."""

    def choose(self, blocks: Sequence[int]) -> EngineLink:
        """The engine for a prompt. Without a ready engine, one that will be ready; if all are gone, any of them."""

    def refuge(self, blocks: Sequence[int], num_sequences: int, *, even_full: bool) -> EngineLink | None:
        """The new engine for a request whose engine died. None if no ready engine has room for its sequences.

        Args:
            even_full: any ready engine will do.
        """

    def add_prompt(self, link: EngineLink, blocks: Sequence[int]) -> int:
        """Notes that an engine was sent a prompt. Returns the number of its tokens that the engine has probably
        cached."""

    def on_placed_elsewhere(self, engine: int, blocks: Sequence[int]) -> None:
        """Notes that another frontend has sent a prompt to engine number `engine`."""

    def on_ready(self, link: EngineLink, ready: EngineReady) -> None:
        """Notes that an engine is ready, with an empty cache."""

    def on_load(self, link: EngineLink) -> None:
        """Notes that an engine's load has changed."""

    def on_empty(self, link: EngineLink) -> None:
        """Notes that an engine's cache is empty: it was reset, or the engine ended."""


def make_selector(links: Sequence[EngineLink], num_slots: int, rules: RoutingRules | None) -> EngineSelector:
    """The selector for these engines.

    Args:
        links: the engines, by number.
        num_slots: sequences that an engine runs at once.
        rules: the router's; None for the usual ones.
    """
    return (
        RoutedEngineSelector(links, num_slots, rules or RoutingRules())
        if len(links) > 1
        else SingleEngineSelector(links[0])
    )


class SingleEngineSelector:
    """Selects the only engine. Nothing has to be known of prompts."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    def blocks(self, request: EngineRequest) -> list[int]:
        return []

    def choose(self, blocks: Sequence[int]) -> EngineLink:
        return self._link

    def refuge(self, blocks: Sequence[int], num_sequences: int, *, even_full: bool) -> EngineLink | None:
        return None

    def add_prompt(self, link: EngineLink, blocks: Sequence[int]) -> int:
        return 0

    def on_placed_elsewhere(self, engine: int, blocks: Sequence[int]) -> None:
        """Does nothing."""

    def on_ready(self, link: EngineLink, ready: EngineReady) -> None:
        """Does nothing."""

    def on_load(self, link: EngineLink) -> None:
        """Does nothing."""

    def on_empty(self, link: EngineLink) -> None:
        """Does nothing."""


class RoutedEngineSelector:
    """Selects engines with a router, and keeps the router up to date."""

    def __init__(self, links: Sequence[EngineLink], num_slots: int, rules: RoutingRules) -> None:
        self._links = links
        self._num_slots = num_slots
        self._block_tokens = rules.block_tokens
        self._router = Router(len(links), rules)

    def blocks(self, request: EngineRequest) -> list[int]:
        embeds = None if request.prompt_embeds is None else request.prompt_embeds.row_digests
        adapter = None if request.adapter is None else request.adapter.digest
        return prompt_blocks(
            request.prompt_token_ids,
            request.cache_salt,
            embeds,
            adapter=adapter,
            adapter_start=request.adapter_start,
            block_tokens=self._block_tokens,
        )

    def choose(self, blocks: Sequence[int]) -> EngineLink:
        while (choice := self._router.choose(blocks)) is not None:
            link = self._links[choice.engine]
            if link.engine.is_ready:
                return link
            self._router.set_load(link.number, FULL)  # it is about to end
        return min(self._links, key=lambda link: (link.engine.is_dead, link.load.num_own))

    def refuge(self, blocks: Sequence[int], num_sequences: int, *, even_full: bool) -> EngineLink | None:
        link = self.choose(blocks)
        has_room = even_full or link.load.num_sequences + num_sequences <= self._num_slots
        return link if link.engine.is_ready and has_room else None

    def add_prompt(self, link: EngineLink, blocks: Sequence[int]) -> int:
        return self._router.add_prompt(link.number, blocks)

    def on_placed_elsewhere(self, engine: int, blocks: Sequence[int]) -> None:
        self._router.add_prompt(engine, blocks)

    def on_ready(self, link: EngineLink, ready: EngineReady) -> None:
        self._router.set_capacity(link.number, ready.num_pages * ready.block_size if ready.caches_prefixes else 0)
        self.on_load(link)

    def on_load(self, link: EngineLink) -> None:
        self._router.set_load(link.number, link.load.value if link.engine.is_ready else FULL)

    def on_empty(self, link: EngineLink) -> None:
        self._router.forget(link.number)
        self.on_load(link)
