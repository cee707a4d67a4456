"""The HTTP application: keys, CORS, ids, limits and routes, without an engine process."""

import asyncio
import gzip
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from quire.core.errors import ConfigError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.app import create_app
from quire.frontend.http.middleware import HttpMetrics, RequestObserver
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.websockets import REALTIME

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> AsyncLLM:
    """An engine that is configured but never started."""
    return AsyncLLM.from_engine_args(model=str(checkpoint("llama")), served_model_name=["tiny", "org/tiny"])


class Caller:
    """Sends requests to an application without a socket."""

    def __init__(self, engine: AsyncLLM, ready: bool = True, **options: Any) -> None:
        self._runner = asyncio.Runner()
        server = ServerConfig(**options)
        registry = CollectorRegistry()
        app = create_app(engine, server, state=ServerState(ready=ready), registry=registry)
        self.routes: list[Any] = list(app.routes)
        self._app = RequestObserver(
            app,
            HttpMetrics(registry),
            request_id_headers=server.enable_request_id_headers,
            has_cors=bool(server.allowed_origins),
        )

    def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
                return await client.request(method, path, **options)

        return self._runner.run(send())

    def close(self, engine: AsyncLLM | None = None) -> None:
        """Ends the loop, and an engine that may have been started in it."""
        if engine is not None:
            self._runner.run(engine.aclose())
        self._runner.close()


@pytest.fixture
def caller(engine: AsyncLLM) -> Iterator[Callable[..., Caller]]:
    """`caller(api_key=["k"])`: an application with these options of the server."""
    made: list[Caller] = []

    def make(**options: Any) -> Caller:
        made.append(Caller(engine, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def call(caller: Callable[..., Caller]) -> Caller:
    return caller()


# --------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer one ", "Bearer onetwo", "Basic one", "one", "Bearer é"]
)
def test_wrong_or_missing_key_is_refused(caller: Callable[..., Caller], header: str | None) -> None:
    call = caller(api_key=["one!", "two"])
    headers = {"Authorization": header.encode()} if header else {}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions")):
        answer = call(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "AuthenticationError"


@pytest.mark.parametrize("key", ["one!", "two"])
def test_each_key_opens_v1(caller: Callable[..., Caller], key: str) -> None:
    call = caller(api_key=["one!", "two"])
    assert call("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_anthropics_clients_send_the_key_in_a_header_of_their_own(caller: Callable[..., Caller]) -> None:
    call = caller(api_key=["one!", "two"])
    assert call("GET", "/v1/models", headers={"x-api-key": "two"}).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "two"}):
        answer = call("POST", "/v1/messages", headers=headers, json={})
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    assert call("POST", "/invocations", json={}).status_code == 401


MONITORING = {"/health", "/ready", "/readyz", "/live", "/livez", "/ping", "/metrics", "/version", "/load"}
DOCUMENTATION = {
    "/docs",
    "/docs/{path:str}",
    "/docs/openapi.json",
    "/docs/oauth2-redirect.html",
    "/openapi.json",
    "/redoc",
    "/static/{name:str}",
}


def test_every_route_asks_for_the_key_but_those_that_only_tell(engine: AsyncLLM) -> None:
    server = ServerConfig(api_key=["one"], enable_server_load_tracking=True)
    app = create_app(engine, server)
    told = set()

    async def answer(method: str, path: str) -> int:
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return (await client.request(method, path)).status_code

    for route in app.routes:
        for method in route.methods - {"OPTIONS"}:  # which tell a browser what may be asked
            if asyncio.run(answer(method, re.sub("{[^}]*}", "x", route.path))) != 401:
                told.add(route.path)
    told.remove(REALTIME)  # a websocket asks at its handshake
    assert told == {"/", *MONITORING, *DOCUMENTATION}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [5]}),
        ("POST", "/v1/chat/completions/render", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_the_tokenizer_asks_for_the_key(
    caller: Callable[..., Caller], method: str, path: str, body: dict[str, Any]
) -> None:
    call = caller(api_key=["one"])
    assert call(method, path, json=body).status_code == 401
    assert call(method, path, json=body, headers={"Authorization": "Bearer two"}).status_code == 401
    assert call(method, path, json=body, headers={"Authorization": "Bearer one"}).status_code == 200


def test_a_timeline_is_for_those_who_have_the_key(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    call = Caller(AsyncLLM.from_engine_args(model=str(checkpoint("llama")), profiler_config=config), api_key=["one"])
    assert {call("POST", path).status_code for path in ("/start_profile", "/stop_profile")} == {401}
    call.close()


def test_key_from_the_environment(caller: Callable[..., Caller], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    call = caller()
    assert call("GET", "/v1/models").status_code == 401
    assert call("GET", "/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


# --------------------------------------------------------------------------------------------------------------- CORS

ORIGIN = "https://chat.example"


def test_allowed_origin_may_call_and_read_errors(caller: Callable[..., Caller]) -> None:
    call = caller(allowed_origins=[ORIGIN], api_key=["k"], allow_credentials=True)
    answer = call("GET", "/v1/models", headers={"Origin": ORIGIN})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-credentials"] == "true"


def test_preflight_needs_no_key(caller: Callable[..., Caller]) -> None:
    call = caller(allowed_origins=[ORIGIN], api_key=["k"], allowed_methods=["POST"], allowed_headers=["x-a"])
    headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-a",
    }
    answer = call("OPTIONS", "/v1/chat/completions", headers=headers)
    assert answer.is_success
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-methods"] == "POST"
    assert "x-a" in answer.headers["access-control-allow-headers"]


def preflight(call: Caller, **asked: str) -> httpx.Response:
    headers = {f"Access-Control-Request-{name}": value for name, value in asked.items()}
    return call("OPTIONS", "/v1/chat/completions", headers={"Origin": ORIGIN, **headers})


def test_every_page_may_call_but_without_credentials(caller: Callable[..., Caller]) -> None:
    call = caller(allowed_origins=["*"])
    answer = preflight(call, Method="POST", Headers="authorization, content-type, x-stainless-os")
    assert answer.is_success
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert {"authorization", "x-stainless-os"} <= set(answer.headers["access-control-allow-headers"].split(", "))
    assert "access-control-allow-credentials" not in answer.headers
    for path, status in (("/v1/models", 200), ("/v1/nowhere", 404)):
        answer = call("GET", path, headers={"Origin": ORIGIN})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


def test_with_credentials_the_origin_is_named_as_browsers_want(caller: Callable[..., Caller]) -> None:
    call = caller(allowed_origins=["*"], allow_credentials=True)
    for answer in (preflight(call, Method="POST"), call("GET", "/v1/models", headers={"Origin": ORIGIN})):
        assert answer.is_success
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["vary"] == "Origin"
        assert answer.headers["access-control-allow-credentials"] == "true"


def test_methods_and_headers_that_are_not_allowed_fail_the_preflight(caller: Callable[..., Caller]) -> None:
    call = caller(allowed_origins=["*"], allowed_methods=["GET"], allowed_headers=["x-a"])
    assert preflight(call, Method="GET", Headers="x-a").is_success
    assert preflight(call, Method="POST").status_code == 400
    assert preflight(call, Method="GET", Headers="authorization").status_code == 400


def test_no_page_may_call_where_no_origin_is_allowed(call: Caller) -> None:
    """As by default: a page could else run prompts on the server of whoever opens it."""
    for answer in (preflight(call, Method="POST"), call("GET", "/version", headers={"Origin": ORIGIN})):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_what_says_how_pages_may_call_is_warned_of_where_none_may(
    caller: Callable[..., Caller], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    caller(allow_credentials=True)
    assert "need --allowed-origins" in caplog.text
    caplog.clear()
    caller()
    caller(allowed_origins=[ORIGIN], allow_credentials=True)
    assert "--allowed-origins" not in caplog.text


def test_other_origins_get_no_cors_headers(caller: Callable[..., Caller]) -> None:
    call = caller(allowed_origins=[ORIGIN])
    assert "access-control-allow-origin" not in call("GET", "/version", headers={"Origin": "https://b.example"}).headers


# ---------------------------------------------------------------------------------------------------------------- ids


def test_request_id_is_echoed_or_made(caller: Callable[..., Caller]) -> None:
    call = caller(enable_request_id_headers=True)
    assert call("GET", "/version", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    made = [call("GET", "/nowhere").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(made)


def test_request_id_header_is_off_by_default(call: Caller) -> None:
    assert "x-request-id" not in call("GET", "/version").headers


# ------------------------------------------------------------------------------------------------------ routes, errors


def test_unknown_route_and_wrong_method_have_the_error_shape(call: Caller) -> None:
    answer = call("GET", "/v1/nowhere")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    answer = call("GET", "/v1/completions")
    assert answer.status_code == 405
    assert "POST" in answer.headers["allow"]
    assert answer.json()["error"]["code"] == 405


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/moderations", "Quire does not judge whether texts are allowed."),
        ("/v1/images/generations", "Quire does not make or edit images"),
        ("/v1/audio/speech", "Quire does not speak"),
        ("/v1/fine_tuning/jobs/x/cancel", "Quire does not keep files, or train"),
        ("/v1/batches", "quire run-batch does"),
        ("/abort_requests/", "/inference/v1/abort_requests does that."),
        ("/v1/embeddingsx", "There is no such route; /docs lists them."),
    ],
)
def test_a_404_says_what_is_lacking(call: Caller, path: str, told: str) -> None:
    answer = call("POST", path, json={})
    assert answer.status_code == 404
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit_is_413(caller: Callable[..., Caller], chunked: bool) -> None:
    async def parts() -> Any:
        for _ in range(20):
            yield b"x" * 100

    call = caller(max_request_body_bytes=1000)
    answer = call("POST", "/v1/completions", content=parts() if chunked else b"x" * 2000)
    assert answer.status_code == 413
    assert "1000 bytes" in answer.json()["error"]["message"]
    assert call("POST", "/tokenize", json={"prompt": "short"}).status_code == 200


def test_a_malformed_host_does_not_hide_an_error(call: Caller) -> None:
    answer = call("GET", "/v1/nowhere", headers={"Host": "a:port"})
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"]


def test_empty_body_is_told(call: Caller) -> None:
    answer = call("POST", "/v1/completions")
    assert answer.status_code == 400
    assert "empty" in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [*range(300, 1000, 50), 100_000])
def test_deep_nesting_is_a_bad_request(call: Caller, depth: int) -> None:
    body = b'{"messages": [{"role": "user", "content": "a", "x": %s%s}], "model": "tiny"}' % (
        b"[" * depth,
        b"]" * depth,
    )
    answer = call("POST", "/tokenize", content=body, headers=JSON)
    assert answer.status_code in ((200, 400) if depth < 1000 else (400,))


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/json ;x=y"])
def test_bodies_are_json(call: Caller, kind: str) -> None:
    headers = {"Content-Type": kind, "Content-Encoding": "identity"}
    assert call("POST", "/tokenize", content=b'{"prompt": "a"}', headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/invocations", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain;a/json",
     "application/jsonl", "", None],
)  # fmt: skip
def test_bodies_that_any_page_may_send_are_refused(call: Caller, path: str, kind: str | None) -> None:
    """Those that a browser sends without a preflight, by Fetch, and those without a type."""
    headers = {} if kind is None else {"Content-Type": kind, "Origin": "http://evil.example"}
    answer = call("POST", path, content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "br", "x-unknown"])
def test_compressed_bodies_are_refused(call: Caller, coding: str) -> None:
    answer = call("POST", "/tokenize", content=gzip.compress(b"{}"), headers={**JSON, "Content-Encoding": coding})
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "identity"  # RFC 9110, section 15.5.16
    assert coding in answer.json()["error"]["message"]


@pytest.mark.parametrize("origins", [["*"], ["http://a"]])
@pytest.mark.parametrize("headers", [{}, {"Origin": "http://a"}, {"Origin": "http://b"}])
def test_caches_are_told_that_answers_differ_by_origin(
    caller: Callable[..., Caller], origins: list[str], headers: dict[str, str]
) -> None:
    call = caller(allowed_origins=origins)
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/nowhere"), ("OPTIONS", "/v1/models")):
        assert call(method, path, headers=headers).headers.get_list("vary") == ["Origin"]
    assert "vary" not in caller(allowed_origins=[])("GET", "/v1/models", headers=headers).headers


def test_models_are_listed_under_every_name(call: Caller) -> None:
    cards = call("GET", "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "org/tiny"]
    assert cards[0]["max_model_len"] == 2048
    assert cards[0]["object"] == "model"
    [permission] = cards[0]["permission"]
    assert permission.pop("id").startswith("modelperm-")
    assert permission.pop("created") == cards[0]["created"]
    assert permission == {
        "object": "model_permission", "organization": "*", "group": None, "is_blocking": False, "allow_view": True,
        "allow_sampling": True, "allow_logprobs": True, "allow_create_engine": False, "allow_search_indices": False,
        "allow_fine_tuning": False,
    }  # fmt: skip
    assert call("GET", "/v1/models/org/tiny").json() == cards[1]
    answer = call("GET", "/v1/models/gpt-4")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"


def test_load_is_there_when_tracked(caller: Callable[..., Caller], call: Caller) -> None:
    assert call("GET", "/load").status_code == 404
    assert caller(enable_server_load_tracking=True)("GET", "/load").json() == {"server_load": 0}


def test_documentation_can_be_turned_off(caller: Callable[..., Caller], call: Caller) -> None:
    schema = call("GET", "/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/health"} <= set(schema["paths"])
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = schema["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]["properties"]
    assert {"messages", "temperature", "stream_options"} <= set(fields)
    assert {call("GET", path).status_code for path in ("/docs", "/redoc")} == {200}
    off = caller(disable_fastapi_docs=True)
    assert {off("GET", path).status_code for path in ("/docs", "/redoc", "/openapi.json")} == {404}


LOADED = re.compile(r"""(?:src|href)=["']([^"']+)["']""")


@pytest.mark.parametrize("prefix", ["", "/below/here"])
@pytest.mark.parametrize("page", ["/docs", "/redoc"])
def test_documentation_loads_nothing_from_other_hosts(caller: Callable[..., Caller], page: str, prefix: str) -> None:
    call = caller(root_path=prefix or None)
    answer = call("GET", page)
    loaded = [url for url in LOADED.findall(answer.text) if not url.startswith("data:")]
    assert loaded
    for url in loaded:
        assert url.startswith(f"{prefix}/static/")
        asset = call("GET", url.removeprefix(prefix))
        assert asset.status_code == 200
        assert asset.headers["content-type"].split(";")[0] in ("text/javascript", "text/css")
        assert "//cdn." not in asset.text
    rules = answer.headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in rules
    assert not [rule for rule in rules if "http" in rule or "*" in rule]


def test_static_files_are_those_of_the_documentation(caller: Callable[..., Caller], call: Caller) -> None:
    assert call("GET", "/static/logo-mini.svg").headers["content-type"] == "image/svg+xml"
    for name in ("__init__.py", "..%2F__init__.py", "index.html"):
        assert call("GET", f"/static/{name}").status_code == 404
    assert caller(disable_fastapi_docs=True)("GET", "/static/swagger-ui.css").status_code == 404


HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_the_front_page_says_what_this_is(call: Caller) -> None:
    about = call("GET", "/").json()
    assert about["name"] == "Quire"
    assert about["version"] == call("GET", "/version").json()["version"]
    assert about["models"] == ["tiny", "org/tiny"]
    page = call("GET", "/", headers={**HTML, "Host": "me.example:1234"})
    assert page.headers["content-type"].startswith("text/html")
    assert about["version"] in page.text
    assert "tiny" in page.text
    assert "curl http://me.example:1234/v1/chat/completions" in page.text
    links = [url for url in LOADED.findall(page.text) if not url.startswith("data:")]
    assert {"/docs", "/redoc"} <= set(links)
    assert {call("GET", url).status_code for url in links} == {200}
    assert "<b>" not in call("GET", "/", headers={**HTML, "Host": "<b>"}).text


def test_the_front_page_tells_strangers_no_models(caller: Callable[..., Caller]) -> None:
    call = caller(api_key=["one"], root_path="below/", disable_fastapi_docs=True)
    assert set(call("GET", "/").json()) == {"name", "version"}
    page = call("GET", "/", headers=HTML).text
    assert "tiny" not in page
    assert "Authorization: Bearer" in page
    assert "/below/v1/chat/completions" in page
    assert LOADED.findall(page)[1:] == ["/below/health", "/below/metrics"]


def test_nothing_is_answered_while_the_model_loads(caller: Callable[..., Caller]) -> None:
    call = caller(ready=False)
    for method, path in (("GET", "/health"), ("POST", "/ping"), ("GET", "/v1/models")):
        answer = call(method, path)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
    assert call("POST", "/v1/completions", json={"prompt": "a"}).status_code == 503
    assert call("GET", "/version").status_code == 200
    assert call("GET", "/metrics").status_code == 200


def test_health_tells_how_the_engine_is(call: Caller, caller: Callable[..., Caller]) -> None:
    answer = call("GET", "/health")
    assert answer.status_code == 200
    assert answer.json() == {"engine": {"state": "starting", "silent_seconds": None}}
    loading = caller(ready=False)("GET", "/health").json()
    assert "loading" in loading["error"]["message"]
    assert loading["engine"]["state"] == "starting"


def test_health_tells_why_the_engine_is_gone(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_RPC_BASE_PATH", "/nowhere")
    engine = AsyncLLM.from_engine_args(model=str(checkpoint("llama")))
    with pytest.raises(ConfigError):
        asyncio.run(engine.start())
    call = Caller(engine)
    for method, path in (("GET", "/health"), ("POST", "/ping")):
        answer = call(method, path)
        assert answer.status_code == 503
        assert answer.json()["engine"]["state"] == "dead"
        assert "QUIRE_RPC_BASE_PATH" in answer.json()["engine"]["reason"]
        assert "QUIRE_RPC_BASE_PATH" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == 503
    call.close()


def test_http_metrics_count_by_route(call: Caller) -> None:
    for _ in range(3):
        call("GET", "/v1/models/tiny")
    call("GET", "/v1/models/nope")
    call("GET", "/nowhere")
    text = call("GET", "/metrics").text
    assert 'http_requests_total{handler="/v1/models/{name}",method="GET",status="2xx"} 3.0' in text
    assert 'http_requests_total{handler="/v1/models/{name}",method="GET",status="4xx"} 1.0' in text
    assert 'http_requests_total{handler="none",method="GET",status="4xx"} 1.0' in text
    assert 'http_request_duration_seconds_count{handler="/v1/models/{name}",method="GET"} 4.0' in text
    for name in ("http_request_size_bytes", "http_response_size_bytes", "http_request_duration_highr_seconds"):
        assert f"# TYPE {name} " in text
    for name in ("python_info", "process_resident_memory_bytes", "python_gc_objects_collected_total"):
        assert name in text


# ---------------------------------------------------------------------------------------------------------- tokenizer


def test_tokenize_and_back(call: Caller) -> None:
    answer = call("POST", "/tokenize", json={"prompt": "The quick fox", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert call("POST", "/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "The quick fox"}


def test_tokenizer_info_is_told_where_that_is_enabled(caller: Callable[..., Caller], call: Caller) -> None:
    assert call("GET", "/tokenizer_info").status_code == 404
    info = caller(enable_tokenizer_info_endpoint=True)("GET", "/tokenizer_info").json()
    assert info["tokenizer_class"]
    assert "<|im_start|>" in info["chat_template"]
    own = caller(enable_tokenizer_info_endpoint=True, chat_template="{{ messages }}", api_key=["k"])
    assert own("GET", "/tokenizer_info").status_code == 401
    headers = {"Authorization": "Bearer k"}
    assert own("GET", "/tokenizer_info", headers=headers).json()["chat_template"] == "{{ messages }}"
    assert "/tokenizer_info" in own("GET", "/openapi.json").json()["paths"]


def test_tokenize_renders_conversations(call: Caller) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    tokens = call("POST", "/tokenize", json={"messages": messages}).json()["tokens"]
    text = call("POST", "/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"prompt": "a", "model": "other"}, "model"),
    ],
)
def test_bad_tokenize_request_is_refused(call: Caller, body: dict[str, Any], param: str) -> None:
    answer = call("POST", "/tokenize", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_detokenize_refuses_unknown_ids(call: Caller) -> None:
    for token in (-1, 10**6, 2**70):
        assert call("POST", "/detokenize", json={"tokens": [token]}).status_code == 400


def test_chat_template_options(caller: Callable[..., Caller], tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.content }}|{{ mood }}]{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(template)
    body = {"messages": [{"role": "user", "content": "x"}]}
    for given in (template, str(file)):
        call = caller(chat_template=given, default_chat_template_kwargs={"mood": "calm"})
        for extra, expected in (({}, "[x|calm]"), ({"chat_template_kwargs": {"mood": "wild"}}, "[x|wild]")):
            tokens = call("POST", "/tokenize", json={**body, **extra}).json()["tokens"]
            assert call("POST", "/detokenize", json={"tokens": tokens}).json()["prompt"] == expected


def test_error_stacks_are_logged_when_asked(caller: Callable[..., Caller], caplog: pytest.LogCaptureFixture) -> None:
    caller()("POST", "/tokenize", json={})
    assert not caplog.records
    caller(log_error_stack=True)("POST", "/tokenize", json={})
    [record] = caplog.records
    assert record.exc_info is not None
    assert "POST /tokenize was answered 400" in record.getMessage()


def test_a_clients_template_runs_where_it_is_trusted(caller: Callable[..., Caller]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ messages[0].content }}!"}
    answer = caller(trust_request_chat_template=True)("POST", "/v1/chat/completions/render", json=body)
    assert answer.json()["prompt_text"] == "Hi!"
    refused = caller()("POST", "/v1/chat/completions/render", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template"


def test_tools_can_be_left_out_when_none_may_be_called(caller: Callable[..., Caller]) -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "tool_choice": "none"}
    for exclude, text in ((False, "fHi"), (True, "Hi")):
        call = caller(chat_template=template, exclude_tools_when_tool_choice_none=exclude)
        assert call("POST", "/v1/chat/completions/render", json=body).json()["prompt_text"] == text


def test_the_document_describes_all_protocols(call: Caller) -> None:
    paths = call("GET", "/openapi.json").json()["paths"]
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/{response_id}/cancel"):
        assert path in paths
