"""State of the requests in a worker's slots, one object for each purpose."""

from typing import Protocol

from quire.core.wire.protocol import NewSlot


class SlotState(Protocol):
    """Holds some state of every request in a slot. The model runner announces requests that enter and leave."""

    def admit(self, request: NewSlot) -> None:
        """Adds a request that enters a slot, and overwrites the previous request's state."""
        ...

    def release(self, slots: list[int]) -> None:
        """Drops the requests in these slots, which may be unfinished."""
        ...
