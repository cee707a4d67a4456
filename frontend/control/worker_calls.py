"""Calls of a program's functions on the workers."""

import asyncio
from collections.abc import Callable
from typing import Any

from quire.core.engine.client import EngineClient
from quire.core.errors import ConfigError
from quire.core.wire import function_call


class WorkerCalls:
    """Runs functions on every worker between two steps.

    Args:
        allowed: the engine runs with `allow_insecure_serialization`.
    """

    def __init__(self, client: EngineClient, *, allowed: bool) -> None:
        self._client = client
        self._allowed = allowed

    async def call(
        self,
        method: str | Callable[..., Any],
        timeout: float | None,  # noqa: ASYNC109 - vLLM's name
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        """Calls `method` on every worker and returns the results by rank; `AsyncLLM.collective_rpc` has the details."""
        if not self._allowed:
            raise ConfigError(
                "Functions travel to workers as pickles, which can run anything there: allow that with "
                "allow_insecure_serialization=True, or QUIRE_ALLOW_INSECURE_SERIALIZATION=1."
            )
        payload = function_call.pack(method, args, kwargs)
        async with asyncio.timeout(timeout):
            results = await self._client.call_workers(function_call.FUNCTION_CALL, payload)
        return [function_call.unpack(result) for result in results]
