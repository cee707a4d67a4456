"""State that a worker keeps of the requests in its slots, one object for each purpose."""

from typing import Protocol

from quire.core.wire.protocol import NewSlot


class SlotState(Protocol):
    """Keeps some state of every request in a slot. The model runner tells it which requests enter and leave."""

    def admit(self, request: NewSlot) -> None:
        """A request enters a slot. Overwrites what the last request left there."""
        ...

    def release(self, slots: list[int]) -> None:
        """The requests in these slots are gone, perhaps before they were done."""
        ...
