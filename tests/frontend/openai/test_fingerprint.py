"""The forms of `system_fingerprint` over HTTP: one engine, and an application for each form."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

import quire
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.app import create_app
from quire.frontend.http.server_config import ServerConfig

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
}
HASHED = re.escape(f"quire-{quire.__version__}-") + "[0-9a-f]{8}"


async def told(engine: AsyncLLM, **options: Any) -> list[Any]:
    """The fingerprints of whole answers and of the last events of streams; "absent" where there is no such field."""
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(**options)))  # type: ignore[arg-type]
    found = []
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=60) as http:
        for path, body in BODIES.items():
            whole = (await http.post(path, json=body)).raise_for_status().json()
            stream = (await http.post(path, json={**body, "stream": True})).raise_for_status().text
            *_, last, done = [line for line in stream.splitlines() if line]
            assert done == "data: [DONE]"
            found += [whole.get("system_fingerprint", "absent")]
            found += [json.loads(last.removeprefix("data: ")).get("system_fingerprint", "absent")]
    return found


def test_each_mode_tells_its_own_fingerprint(checkpoint: Callable[..., Path]) -> None:
    async def work() -> None:
        async with AsyncLLM.from_engine_args(model=str(checkpoint("llama")), device="cpu") as engine:
            full, hashed = await told(engine), await told(engine, fingerprint_mode="hash")
            assert re.fullmatch(HASHED, full[0])
            assert full == hashed == [full[0]] * 4  # full differs with parallelism alone
            assert await told(engine, fingerprint_mode="custom", fingerprint_value="mine") == ["mine"] * 4
            assert await told(engine, fingerprint_mode="none") == [None, "absent", None, "absent"]

    asyncio.run(work())
