"""Who makes a request: the holder of an API key. It follows the request through all tasks that work on it."""

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal, Protocol

from quire.core.errors import OverloadedError

Quantity = Literal["requests", "tokens"]


class Limits(Protocol):
    """The limits a minute of all keys, which the servers of one command share."""

    async def take(self, name: str, quantity: Quantity, amount: int, limit: int) -> float:
        """Counts `amount` for the key with this name, if its limit leaves room; returns 0.0, or the seconds until
        there is room, and nothing is counted."""

    def add(self, name: str, quantity: Quantity, amount: int) -> None:
        """Counts `amount` whether or not there is room."""


class Caller:
    """The holder of a key.

    Args:
        name: as the key file has it.
        weight: its share of the engine beside others.
        requests_per_minute, tokens_per_minute: None: no limit.
        limits: counts what it used in the last minute.
        count: is told how many requests were let in or refused, and tokens used, since the last call: (kind, number).
        is_alone: there is no other key, so nothing needs to be kept apart.
    """

    def __init__(
        self,
        name: str,
        *,
        weight: float,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        limits: Limits,
        count: Callable[[str, str, int], None],
        is_alone: bool,
    ) -> None:
        self.name = name
        self.weight = weight
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._limits = limits
        self._count = count
        self._is_alone = is_alone

    async def admit_request(self) -> None:
        """Counts a request. Raises OverloadedError past the key's limit."""
        await self._take("requests", 1, self._requests_per_minute)
        self._count(self.name, "requests", 1)

    async def admit_tokens(self, num_prompt_tokens: int) -> None:
        """Counts the tokens of a prompt. Raises OverloadedError past the key's limit."""
        await self._take("tokens", num_prompt_tokens, self._tokens_per_minute)
        self._count(self.name, "prompt_tokens", num_prompt_tokens)

    def add_output(self, num_tokens: int) -> None:
        """Counts tokens that were generated."""
        if self._tokens_per_minute is not None:
            self._limits.add(self.name, "tokens", num_tokens)
        self._count(self.name, "generation_tokens", num_tokens)

    def salted(self, salt: str | None) -> str | None:
        """The salt of a prompt in the prefix cache: what one key has computed, no other finds, nor sees by the time.

        A key's name has no colon, so no salt that a client chooses makes it another key's.
        """
        if self._is_alone:
            return salt
        return f"{self.name}:" if salt is None else f"{self.name}:{salt}"

    async def _take(self, quantity: Quantity, amount: int, limit: int | None) -> None:
        if limit is None:
            return
        seconds = await self._limits.take(self.name, quantity, amount, limit)
        if seconds:
            self._count(self.name, f"refused_{quantity}", 1)
            raise OverloadedError(
                f"The API key {self.name!r} may use {limit} {quantity} a minute, and has. Try again in "
                f"{math.ceil(seconds)} s.",
                retry_after_seconds=seconds,
            )


_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def set_caller(caller: Caller) -> None:
    """Makes `caller` that of the task that runs, and of the tasks that it starts from now on."""
    _CALLER.set(caller)


def current_caller() -> Caller | None:
    """The caller whose task runs; None for a program, and on a server without keys."""
    return _CALLER.get()


def current_owner() -> str:
    """The name under which the caller's entries are stored; empty without one."""
    caller = _CALLER.get()
    return "" if caller is None else caller.name
