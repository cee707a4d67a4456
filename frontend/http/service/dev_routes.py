"""Routes for those who develop or measure a server; with QUIRE_SERVER_DEV_MODE=1 only."""

import asyncio
from typing import Any, Literal

from litestar import get, post
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp
from msgspec import Struct

from quire.core.logging import get_logger
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.answers import documented, documented_empty, json_answer
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.service.server_info import ServerInfo, describe

logger = get_logger(__name__)


class CacheReset(Struct):
    """Answer of POST /reset_prefix_cache: false where running requests still hold pages that others can find."""

    success: bool


def dev_routes(engine: AsyncLLM, server: ServerConfig, state: ServerState) -> list[Any]:
    """Handlers that describe the server's set-up and that empty its caches."""
    logger.warning("QUIRE_SERVER_DEV_MODE=1: every client of this server may read its set-up and empty its caches.")

    @post("/reset_prefix_cache", status_code=200, responses=documented(CacheReset), summary="Reset the prefix cache")
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> ASGIApp:
        """Drops the keys and values of earlier requests.

        With `reset_running_requests`, running requests lose theirs too; they are computed again and go on.
        `reset_external` finds nothing to reset, because no cache is shared with other servers.
        """
        state.check_ready()
        return json_answer(CacheReset(await engine.reset_prefix_cache(reset_running_requests, reset_external)))

    @post("/reset_mm_cache", status_code=200, responses=documented_empty(), summary="Reset the cache of media")
    async def reset_mm_cache() -> ASGIApp:
        """Forgets the processed images, videos and sounds that are kept for later prompts."""
        await engine.reset_mm_cache()
        return ASGIResponse(body=b"")

    @get("/server_info", responses=documented(ServerInfo), summary="Server info")
    async def server_info(config_format: Literal["text", "json"] = "text") -> ASGIApp:
        """The options of engine and server, environment variables and the machine, without keys."""
        return json_answer(await asyncio.to_thread(describe, engine.config, server, config_format))

    return [reset_prefix_cache, reset_mm_cache, server_info]
