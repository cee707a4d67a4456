"""What an error tells a client: nothing of the server's files, of its code, or of other clients."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.core.errors import EngineDeadError, EngineError, ModelLoadError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.errors import describe
from quire.frontend.launch.launcher import EngineLauncher
from quire.frontend.text.tokenizer import Tokenizer
from tests.core.engine.null_engine import NULL_WORKER
from tests.frontend.http.test_app import Caller

KEYS = [{"name": "ann-at-work", "key": "key-of-ann"}, {"name": "bob", "key": "key-of-bob"}]
SECRET = "what ann alone has written"
MESSAGES = [{"role": "user", "content": "Hello"}]
WHOLE = {
    "model": "tiny",
    "prompt": "Hello",
    "input": "Hello",
    "messages": MESSAGES,
    "max_tokens": 3,
    "max_output_tokens": 3,
    "token_ids": [5],
    "tokens": [5],
    "ids": [5],
    "sampling_params": {"max_tokens": 2},
    "request_ids": ["a"],
    "inputs": "Hello",
    "query": "a",
    "items": ["a"],
    "label_token_ids": [5],
    "documents": ["a"],
    "texts": ["a"],
    "text_1": "a",
    "text_2": "b",
    "input_type": "search_query",
    "instances": [{"inputs": "a"}],
    "questions": [],
    "state": "a",
}
"""A body with fields of all routes: each takes its own, and ignores the others."""

BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"model": "tiny", "prompt": "Hel',
    "no JSON": b"<a>",
    "no UTF-8": b'{"prompt": "\xff"}',
    "a list": b"[]",
    "an empty object": b"{}",
    "brackets": b"[" * 100_000,
    "whole": json.dumps(WHOLE).encode(),
    "types": json.dumps({name: {"a": [None]} for name in WHOLE}).encode(),
    "another's entries": json.dumps(WHOLE | {"previous_response_id": "resp_a", "conversation": "{entry}"}).encode(),
    "files": json.dumps(WHOLE | {"model": "../../etc/passwd", "chat_template": "{% include '/etc/passwd' %}"}).encode(),
    "a template": json.dumps(WHOLE | {"chat_template": "{{ undefined_thing.x.y }}"}).encode(),
    "a grammar": json.dumps(WHOLE | {"structured_outputs": {"regex": "("}}).encode(),
    "deep": json.dumps(WHOLE | {"tools": [{"type": "function", "function": {"name": "a" * 99}}]}).encode(),
}


@pytest.fixture(scope="module")
def app(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator["App"]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text(json.dumps(KEYS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EngineLauncher.__init__.__kwdefaults__, "worker_factory", NULL_WORKER)
        made = App(checkpoint("llama"), path)
        yield made
        made.call.close(made.engine)


class App:
    """An application without a model, and a conversation of one of its two keys."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.engine = AsyncLLM.from_engine_args(model=str(folder), served_model_name="tiny")
        self.call = Caller(self.engine, api_key_file=str(keys), enable_tokenizer_info_endpoint=True)
        items = [{"role": "user", "content": SECRET}]
        made = self.call("POST", "/v1/conversations", json={"items": items}, headers=self.headers("ann"))
        self.entry: str = made.raise_for_status().json()["id"]
        self.private = [
            *(
                str(folder),
                str(folder.parent),
                str(keys),
                "tokenizer.json",
                sys.prefix,
                "site-packages",
                "quire.frontend",
            ),
            *("Traceback", 'File "', ".py", SECRET, KEYS[0]["name"], "key-of-ann", "key-of-bob"),
        ]

    @staticmethod
    def headers(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer key-of-{name}", "Content-Type": "application/json"}

    def routes(self) -> Iterator[tuple[str, str]]:
        """(method, path), with another key's entry in the place of ids."""
        for route in self.call.routes:
            path = re.sub("{[^}]*}", self.entry, route.path)
            yield from ((method, path) for method in route.methods if method not in ("OPTIONS", "HEAD"))

    def check(self, answer: httpx.Response, where: str) -> None:
        told = [each for each in self.private if each in answer.text or each in str(dict(answer.headers))]
        assert not told, f"{where}: {answer.status_code} {answer.text}"


@pytest.mark.parametrize("case", BROKEN)
def test_no_error_of_any_route_tells_what_is_private(app: App, case: str) -> None:
    """Bob calls."""
    body = BROKEN[case].replace(b"{entry}", app.entry.encode())
    num_errors = 0
    for method, path in app.routes():
        if path in ("/metrics", "/openapi.json") or path.startswith(("/docs", "/redoc", "/schema")):
            continue  # for monitors and readers; no errors
        content = body if method in ("POST", "PUT", "PATCH") else b""
        answer = app.call(method, path, content=content, headers=app.headers("bob"))
        if answer.status_code >= 400:
            num_errors += 1
            app.check(answer, f"{method} {path} {case}")
    assert num_errors > 20


@pytest.mark.parametrize("error", [OSError(2, "No such file"), KeyError("secret"), RuntimeError("secret")], ids=repr)
def test_no_unexpected_error_tells_what_is_private(
    app: App, error: Exception, monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path]
) -> None:
    """The tokenizer fails as no code expects, with a path in its error."""

    def fail(*args: Any, **options: Any) -> Any:
        raise type(error)(*error.args[:1], f"{checkpoint('llama')}/tokenizer.json: {SECRET}")

    for name in ("encode", "encode_batch", "decode", "least_tokens"):
        monkeypatch.setattr(Tokenizer, name, fail)
    statuses = set()
    for method, path in app.routes():
        if method == "POST":
            answer = app.call(method, path, content=BROKEN["whole"], headers=app.headers("bob"))
            statuses.add(answer.status_code)
            if answer.status_code >= 400:
                app.check(answer, f"{method} {path}")
    assert 500 in statuses


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            EngineDeadError("The engine is gone: /srv/models/a/config.json: no such file. Restart the server."),
            "The engine is gone: config.json: no such file. Restart the server.",
        ),
        (ModelLoadError("'/srv/models/x/model-1.safetensors' is cut short"), "'model-1.safetensors' is cut short"),
        (
            EngineError("see https://example.org/a/b and /health, at 1/2"),
            "see https://example.org/a/b and /health, at 1/2",
        ),
    ],
)
def test_errors_of_the_engine_name_files_without_their_folders(error: Exception, message: str) -> None:
    assert describe(error).message == message
