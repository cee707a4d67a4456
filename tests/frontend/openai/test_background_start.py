"""A response in the background is made to its end, even if its client hangs up while it begins."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.entry_store.access import LocalEntries
from quire.frontend.entry_store.store import Entry, EntryStore, Put, Replaces
from quire.frontend.http.app import create_app
from quire.frontend.http.server_config import ServerConfig

BODY: dict[str, Any] = {"input": "Hi", "max_output_tokens": 2, "background": True, "request_id": "mine"}


class SlowEntries(LocalEntries):
    """Keeps an entry at once, and answers when it may, as the parent of several servers does."""

    def __init__(self, store: EntryStore) -> None:
        super().__init__(store)
        self.may_answer = asyncio.Event()

    async def put(self, entry: Entry, *, replaces: Replaces = "anything") -> Put:
        put = await super().put(entry, replaces=replaces)
        await self.may_answer.wait()
        return put


def test_a_client_that_hangs_up_as_its_response_begins_leaves_none_that_is_never_finished(
    checkpoint: Callable[..., Path],
) -> None:
    async def main() -> None:
        server = ServerConfig()
        store = server.entry_store()
        entries = SlowEntries(store)
        async with AsyncLLM.from_engine_args(model=str(checkpoint("llama")), device="cpu") as engine:
            transport = httpx.ASGITransport(create_app(engine, server, entries=entries))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=60) as http:
                asking = asyncio.create_task(http.post("/v1/responses", json=BODY))
                while not len(store):
                    await asyncio.sleep(0.01)
                asking.cancel()
                await asyncio.wait([asking])
                entries.may_answer.set()
                async with asyncio.timeout(60):
                    while store.num_in_making:
                        await asyncio.sleep(0.01)
                response = (await http.get("/v1/responses/resp_mine")).json()
                assert response["status"] in ("completed", "incomplete")
                queued = (await http.post("/v1/responses", json=BODY | {"request_id": "other"})).json()
                assert (queued["status"], queued["output"]) == ("queued", [])

    asyncio.run(main())
