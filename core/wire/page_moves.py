"""Moves of pages between tiers of memory. A plan lists them, and every worker makes them in its own memory."""

from typing import Literal

from msgspec import Struct

Tier = Literal["device", "state", "host"]
"""A memory that is divided into pages:

- "device": the KV cache's pool. Any page may serve any KV group, so its content is its bytes in all cache tensors.
- "state": the recurrent states of the slots. Its pages are the slots, and a page's content is the states of all layers.
- "host": the host's memory. Its pages have the size of the pool's.
"""


class PageMove(Struct, array_like=True, frozen=True):
    """Copies the content of pages to pages of another tier, or of the same one.

    The contents of all sources, one after another, fill the targets in order. States rarely fill their last page: the
    rest of a target is zeros, and the rest of a source is not read.

    A move without an id is done when its plan says. One with an id may take longer than the step, if its source is
    slow. `StepResult.moved` reports it; until then no plan may use its sources or targets for anything else.
    """

    source: Tier
    source_pages: list[int]
    target: Tier
    target_pages: list[int]
    move_id: int | None = None
