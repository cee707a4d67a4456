"""Routes that load and unload adapters while the server runs; with QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1 only."""

from typing import Any

from litestar import post
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp
from msgspec import Struct

from quire.core import envs
from quire.core.errors import ParameterError
from quire.core.logging import get_logger
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.answers import documented
from quire.frontend.http.server_state import ServerState

logger = get_logger(__name__)


class LoadAdapter(Struct):
    """Body of POST /v1/load_lora_adapter. `load_inplace` replaces an adapter of the same name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(Struct):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


def adapter_routes(engine: AsyncLLM, state: ServerState) -> list[Any]:
    """Handlers that add and remove adapters."""
    logger.warning("QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1: clients of these routes may load adapters from any folder")
    answers = documented(str)

    @post("/v1/load_lora_adapter", status_code=200, responses=answers, summary="Load an adapter")
    async def load_lora_adapter(data: LoadAdapter) -> ASGIApp:
        """Serves the adapter of a folder of the server's machine under a name.

        It answers when the adapter is in memory and fits the model. With `load_inplace`, requests that run end with the
        version that they began with.
        """
        state.check_ready()
        if not data.lora_name or not data.lora_path:
            raise ParameterError("Both lora_name and lora_path must be given.", param="lora_name")
        await engine.adapters.load(data.lora_name, data.lora_path, in_place=data.load_inplace)
        return _text(f"Success: LoRA adapter '{data.lora_name}' added successfully.")

    @post("/v1/unload_lora_adapter", status_code=200, responses=answers, summary="Unload an adapter")
    async def unload_lora_adapter(data: UnloadAdapter) -> ASGIApp:
        """Serves an adapter no longer; requests that run end as they would."""
        state.check_ready()
        if not data.lora_name:
            raise ParameterError("lora_name must be given.", param="lora_name")
        engine.adapters.unload(data.lora_name)
        return _text(f"Success: LoRA adapter '{data.lora_name}' removed successfully.")

    return [load_lora_adapter, unload_lora_adapter]


def _text(text: str) -> ASGIResponse:
    return ASGIResponse(body=text.encode(), media_type="text/plain")


def updates_adapters(engine: AsyncLLM) -> bool:
    """True if adapters may be loaded while the server runs."""
    return engine.adapters.are_served and envs.read_flag("ALLOW_RUNTIME_LORA_UPDATING")
