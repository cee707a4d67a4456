"""`--middleware`: the user's own ASGI classes and functions around the server."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from quire.core.errors import ConfigError
from quire.frontend.http.user_middleware import wrapped
from tests.servers import WITHOUT_MODEL, ServerProcess

MODULE = """
class Tag:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def tagged(message):
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-order", b"class")]}
            await send(message)

        if scope["path"] == "/mine":
            await send({"type": "http.response.start", "status": 418, "headers": []})
            await send({"type": "http.response.body", "body": b"tea"})
        else:
            await self.app(scope, receive, tagged)


async def later(request, call_next):
    response = await call_next(request)
    response.headers.append("x-order", f"function for {request.method}")
    return response


neither = 5
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_middleware.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_classes_and_functions_see_every_request(modules: Path, checkpoint: Callable[..., Path]) -> None:
    server = ServerProcess(
        modules, str(checkpoint("llama")), "--middleware", "my_middleware.Tag", "--middleware", "my_middleware.later",
        env={"PYTHONPATH": str(modules)}, program=WITHOUT_MODEL,
    ).wait_until_ready()  # fmt: skip
    try:
        with httpx.Client(base_url=server.base_url, timeout=60) as client:
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
            assert answer.status_code == 200
            assert answer.headers.get_list("x-order") == ["class", "function for POST"]
            assert client.get("/mine").status_code == 418
            body = {"prompt": "a", "max_tokens": 3, "stream": True, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=body) as streamed:
                assert [line for line in streamed.iter_lines() if line][-1] == "data: [DONE]"
                assert streamed.headers.get_list("x-order") == ["class", "function for POST"]
            assert client.get("/nothing").status_code == 404
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere.Class", "cannot be imported: ModuleNotFoundError"),
        ("my_middleware.Tagg", "cannot be imported: AttributeError"),
        ("my_middleware.neither", "neither a class nor a coroutine function"),
        ("Tag", "no import path"),
    ],
)
def test_what_cannot_be_used_is_named(modules: Path, path: str, said: str) -> None:
    async def app(*_: object) -> None: ...

    with pytest.raises(ConfigError, match=f"--middleware: .*{path}.*{said}"):
        wrapped(app, [path])
