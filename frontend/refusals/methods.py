"""The methods of vLLM's classes that Quire does not have, each with its reason.

A class of the Python API calls `explain` for an attribute that it lacks. So `hasattr` is right, and the caller of such
a method reads the reason.
"""

_SLEEP = "Quire keeps weights and KV cache in memory while it runs; end the engine to free them."
_WEIGHTS = "Quire reads weights when it starts, and does not exchange them later; start another engine."
_LORA = "an adapter is loaded when a request brings it (lora_request), or by `add_lora` of the engine."
_PAUSE = "Quire's scheduler does not pause; abort requests, or send none."
_DATA_PARALLEL = "Quire runs one engine; start several servers for more."
_TOWERS = "what towers computed is kept in the prefix cache alone: reset_prefix_cache drops it."

_REASONS = {
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping", "release_kv_cache_memory"), _SLEEP),
    **dict.fromkeys(("checkpoint_prepare", "checkpoint_restore"), _SLEEP),
    **dict.fromkeys(
        ("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update"), _WEIGHTS
    ),
    **dict.fromkeys(("start_draft_weight_update", "update_weights", "finish_weight_update"), _WEIGHTS),
    **dict.fromkeys(("update_weight_version", "get_weight_version", "set_weight_version"), _WEIGHTS),
    "compute_weight_checksums": _WEIGHTS,
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras"), _LORA),
    "pin_lora": "adapters leave the memory in the order of their last use; max_cpu_loras bounds how many are there.",
    **dict.fromkeys(("pause_generation", "resume_generation", "is_paused"), _PAUSE),
    **dict.fromkeys(("scale_elastic_ep", "has_unfinished_requests_dp", "handle_fault"), _DATA_PARALLEL),
    "reset_encoder_cache": _TOWERS,
    "notify_kv_transfer_request_rejected": "Quire transfers no KV cache between engines.",
    "get_kv_event_sources": "Quire publishes no events of its KV cache.",
    "from_vllm_config": "Quire resolves options itself; use from_engine_args.",
    "add_request": "its streams come from `generate`, or from `open_stream`.",
    "get_num_queued_tokens": "the engine's queue counts requests; see get_metrics.",
    "check_admission": "the engine refuses a request when its queue is full (max_num_queued_reqs).",
    "wait_for_requests_to_drain": "read the outputs to their ends; num_unfinished counts the requests.",
    "get_status": "`engine_status` tells the engine's state.",
    "do_log_stats_with_interval": "statistics are logged at intervals by themselves (QUIRE_LOG_STATS_INTERVAL).",
}


def explain(owner: type, name: str) -> str:
    """The message for an attribute that `owner` does not have."""
    what = f"{owner.__name__} has no {name!r}"
    return f"{what}: {_REASONS[name]}" if name in _REASONS else f"{what}."
