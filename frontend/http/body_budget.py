"""Bounds the bytes of all request bodies that the servers of one command have received and not read yet."""

from typing import Any

from quire.core.errors import BodyTooLargeError, OverloadedError
from quire.frontend.http.tally import Tally

FREE_BYTES = 64 * 1024
"""Bytes of each body that do not count, so that small requests are served while large ones fill the budget."""

RETRY_SECONDS = 1.0

_CHARGE = "quire.body_charge"
"""Key in a request's ASGI scope for its BodyCharge."""


class BodyBudget:
    """The bytes that bodies may take together.

    Args:
        max_bytes: of all bodies.
        held: what they take now.
    """

    def __init__(self, max_bytes: int, held: Tally) -> None:
        self.max_bytes = max_bytes
        self.held = held

    def charge(self) -> "BodyCharge":
        """The share of one body, which is empty yet."""
        return BodyCharge(self)


class BodyCharge:
    """What one body takes of the budget, until it has been read or its request ends."""

    __slots__ = ("_budget", "_declared", "_num_bytes", "_num_charged")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._declared = 0  # bytes, by the header Content-Length
        self._num_bytes = 0
        self._num_charged = 0

    def attach(self, scope: dict[str, Any]) -> None:
        """Makes this the charge of the request with an ASGI scope; see `release_charge`."""
        scope[_CHARGE] = self
        lengths = (value for name, value in scope.get("headers", ()) if name == b"content-length" and value.isdigit())
        self._declared = int(next(lengths, 0))

    def add(self, num_bytes: int) -> None:
        """Counts a part of the body.

        Raises:
            BodyTooLargeError: the budget could not hold the whole body even alone.
            OverloadedError: it has no room now.
        """
        self._num_bytes += num_bytes
        amount = self._num_bytes - FREE_BYTES - self._num_charged
        if amount <= 0:
            return
        budget = self._budget
        if (num_bytes := max(self._declared, self._num_bytes)) - FREE_BYTES > budget.max_bytes:
            self.release()
            raise BodyTooLargeError(
                f"The request body has {num_bytes} bytes or more, and the server's --max-inflight-body-bytes "
                f"{budget.max_bytes} has no room for it; raise that limit, or send less."
            )
        if budget.held.total + amount > budget.max_bytes:
            self.release()
            raise OverloadedError(
                f"The server is overloaded: bodies that arrive fill its --max-inflight-body-bytes, which is "
                f"{budget.max_bytes}. Try again in {RETRY_SECONDS:g} s, or send at most {FREE_BYTES} bytes.",
                retry_after_seconds=RETRY_SECONDS,
            )
        budget.held.add(amount)
        self._num_charged += amount

    def remove(self, num_bytes: int) -> None:
        """Gives back what a part has taken that was counted."""
        self._num_bytes -= num_bytes
        amount = max(0, self._num_bytes - FREE_BYTES)
        self._budget.held.add(amount - self._num_charged)
        self._num_charged = amount

    def release(self) -> None:
        """Gives the bytes back. Idempotent."""
        self._budget.held.add(-self._num_charged)
        self._num_bytes = self._num_charged = 0


def charge_of(scope: Any) -> BodyCharge | None:
    """The charge of the request with this ASGI scope; None: bodies have no limit."""
    charge: BodyCharge | None = scope.get(_CHARGE)
    return charge


def release_charge(scope: Any) -> None:
    """Gives back what the body of the request with this ASGI scope has taken, as it has been read."""
    charge = charge_of(scope)
    if charge is not None:
        charge.release()
