"""Routes of OpenAI's, vLLM's and other servers' APIs that Quire lacks, and the messages of their 404 answers."""

_LACKS = {
    "judge whether texts are allowed": ("/v1/moderations",),
    "make or edit images or videos": ("/v1/images", "/v1/videos"),
    "speak": ("/v1/audio/speech", "/v1/audio/voices"),
    "keep files, or train": ("/v1/files", "/v1/uploads", "/v1/fine_tuning", "/v1/vector_stores"),
    "run batches over HTTP: quire run-batch does": ("/v1/batches",),
    "run assistants: /v1/responses has tools and conversations": ("/v1/assistants", "/v1/threads"),
    "sleep, pause or exchange weights": (
        *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/release_kv_cache_memory"),
        *("/update_weights", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
        *("/start_weight_update", "/start_draft_weight_update", "/finish_weight_update", "/update_weight_version"),
        *("/weight_info", "/weight_checker", "/get_world_size"),
    ),
    "keep what towers computed of images and sounds, but in the prefix cache": ("/reset_encoder_cache",),
    "run functions of clients in its workers: AsyncLLM.collective_rpc does in a program": ("/collective_rpc",),
    "add or remove engines while it runs": ("/scale_elastic_ep", "/is_scaling_elastic_ep"),
    "work around broken engines: it starts them again by itself, and /health tells": ("/fault_tolerance",),
    "publish what its caches hold": ("/kv_event_sources",),
    "chat in Cohere's or Ollama's protocol: /v1/chat/completions is OpenAI's": (
        *("/cohere", "/v2/chat", "/api/chat", "/api/generate", "/api/embed"),
    ),
}
_REASONS = {route: what for what, routes in _LACKS.items() for route in routes}
_SWITCHED = {
    "/load": "--enable-server-load-tracking",
    "/tokenizer_info": "--enable-tokenizer-info-endpoint",
    "/start_profile": "--profiler-config",
    "/stop_profile": "--profiler-config",
    "/reset_prefix_cache": "QUIRE_SERVER_DEV_MODE=1",
    "/reset_mm_cache": "QUIRE_SERVER_DEV_MODE=1",
    "/server_info": "QUIRE_SERVER_DEV_MODE=1",
    "/v1/load_lora_adapter": "--enable-lora and QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1",
    "/v1/unload_lora_adapter": "--enable-lora and QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1",
}
"""Routes that need an option or a variable."""

_ELSEWHERE = {
    "/abort_requests": "/inference/v1/abort_requests",
    "/healthz": "/health",
}
"""Routes that have another name here."""


def describe_missing(path: str) -> str:
    """The message of a 404 for `path`. It names the capability that Quire lacks, if that is the reason."""
    parts = path.rstrip("/").split("/")
    prefixes = ("/".join(parts[:count]) for count in range(len(parts), 1, -1))
    route = "/".join(parts)
    if route in _SWITCHED:
        return f"There is no such route: this server was started without {_SWITCHED[route]}, which adds it."
    if route in _ELSEWHERE:
        return f"There is no such route: {_ELSEWHERE[route]} does that."
    what = next((_REASONS[prefix] for prefix in prefixes if prefix in _REASONS), None)
    if what is None:
        return "There is no such route; /docs lists them."
    return f"There is no such route: Quire does not {what}. /docs lists what it does."
