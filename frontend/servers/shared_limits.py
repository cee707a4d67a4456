"""The limits of API keys, which several API servers share: their parent counts what each key uses."""

from collections.abc import Callable

from quire.core.errors import UnavailableError
from quire.frontend.keys.caller import Quantity
from quire.frontend.servers.calls import Calls, LinkEndedError
from quire.frontend.servers.messages import CountUse, TakeLimit


class SharedLimits:
    """The limits of keys, seen from one server; a `Limits`.

    Args:
        calls: go to the parent.
        send: sends the parent a message that needs no answer.
    """

    def __init__(self, calls: Calls, send: Callable[[CountUse], None]) -> None:
        self._calls = calls
        self._send = send

    async def take(self, name: str, quantity: Quantity, amount: int, limit: int) -> float:
        """Takes from a limit that the parent counts, as `Limits.take` does in one process."""
        try:
            seconds: float = await self._calls.ask(TakeLimit(name, quantity, amount, limit), float)
        except LinkEndedError:
            raise UnavailableError("The server is shutting down.", retry_after_seconds=5) from None
        return seconds

    def add(self, name: str, quantity: Quantity, amount: int) -> None:
        """Counts a use with the parent, as `Limits.add` does in one process."""
        self._send(CountUse(name, quantity, amount))
