"""Every route of vLLM 0.33 is served, or its 404 says truly why not."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.missing_routes import describe_missing
from tests.frontend.http.test_app import Caller

SERVED = """
GET /health  GET /ready  GET /readyz  GET /ping  POST /ping  GET /version  GET /metrics  GET /docs  GET /v1/models
POST /v1/chat/completions  POST /v1/chat/completions/batch  POST /v1/completions  POST /invocations
POST /v1/responses  GET /v1/responses/{response_id}  POST /v1/responses/{response_id}/cancel
POST /v1/messages  POST /v1/messages/count_tokens
POST /v1/chat/completions/render  POST /v1/completions/render  POST /v1/messages/render  POST /v1/responses/render
POST /v1/chat/completions/derender  POST /v1/completions/derender
POST /inference/v1/generate  POST /inference/v1/abort_requests
POST /generative_scoring  POST /v1/systemone  POST /v1/decisions
POST /tokenize  POST /detokenize
POST /v1/embeddings  POST /v2/embed  POST /pooling  POST /classify  POST /score  POST /v1/score
POST /rerank  POST /v1/rerank  POST /v2/rerank
POST /v1/audio/transcriptions  POST /v1/audio/translations  GET /v1/realtime
"""

LACKING = {
    "Cohere's": "POST /cohere/v2/chat  POST /cohere/v2/chat/render",
    "sleep, pause or exchange weights": """
        GET /is_sleeping  POST /sleep  POST /wake_up  POST /release_kv_cache_memory
        GET /is_paused  POST /pause  POST /resume  GET /get_world_size  GET /weight_info  POST /weight_checker
        POST /init_weight_transfer_engine  POST /shutdown_weight_transfer_engine  POST /update_weights
        POST /start_weight_update  POST /start_draft_weight_update  POST /finish_weight_update
        POST /update_weight_version""",
    "in the prefix cache": "POST /reset_encoder_cache",
    "functions of clients": "POST /collective_rpc",
    "add or remove engines": "POST /is_scaling_elastic_ep  POST /scale_elastic_ep",
    "starts them again by itself": "POST /fault_tolerance/apply  GET /fault_tolerance/status",
    "what its caches hold": "GET /kv_event_sources",
    "/inference/v1/abort_requests does": "POST /abort_requests",
    "--enable-server-load-tracking": "GET /load",
    "--enable-tokenizer-info-endpoint": "GET /tokenizer_info",
    "--profiler-config": "POST /start_profile  POST /stop_profile",
    "QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1": "POST /v1/load_lora_adapter  POST /v1/unload_lora_adapter",
    "QUIRE_SERVER_DEV_MODE=1": "POST /reset_prefix_cache  POST /reset_mm_cache  GET /server_info",
}
"""What the answer says, and the routes that it says it of."""


def routes_in(text: str) -> Iterator[tuple[str, str]]:
    words = iter(text.split())
    return zip(words, words, strict=True)


@pytest.fixture(scope="module")
def call(checkpoint: Callable[..., Path]) -> Iterator[Caller]:
    """The routes of a server without options, whose engine never starts."""
    engine = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), served_model_name=["tiny"])
    caller = Caller(engine, ready=False)
    yield caller
    caller.close()


def test_the_routes_that_are_served(call: Caller) -> None:
    for method, path in routes_in(SERVED):
        answer = call(method, path, **({"json": {}} if method == "POST" else {}))
        assert answer.status_code not in (404, 405), (method, path)


def test_the_routes_that_are_not(call: Caller) -> None:
    for reason, routes in LACKING.items():
        for method, path in routes_in(routes):
            answer = call(method, path, **({"json": {}} if method == "POST" else {}))
            assert answer.status_code == 404, (method, path)
            assert reason in answer.json()["error"]["message"], (method, path)


def test_a_route_of_nobodys() -> None:
    for path in ("/v1/nothing", "/nothing", "/v1/load", "/"):
        assert describe_missing(path) == "There is no such route; /docs lists them."
