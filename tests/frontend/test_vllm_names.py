"""vLLM 0.32's public names, held against ours: a program that uses one finds it, or reads why it is not there."""

import importlib
import inspect
import subprocess
import sys
from typing import Any

import msgspec
import pytest

import quire
from quire.core.config.engine_args import EngineArgs
from quire.frontend.launch.keywords import read_keywords
from quire.frontend.refusals.methods import explain

GENERATE = "use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs"
CHAT = (
    "messages sampling_params use_tqdm lora_request priority chat_template chat_template_content_format "
    "add_generation_prompt continue_final_message tools chat_template_kwargs tokenization_kwargs mm_processor_kwargs"
)
PROFILE = "profile_prefix * delay_iterations max_iterations"
RPC = "method timeout args kwargs"
RESET = "reset_running_requests reset_connector"
POOLING = {
    "encode": "prompts pooling_params * use_tqdm lora_request pooling_task tokenization_kwargs",
    "embed": "prompts * use_tqdm pooling_params lora_request tokenization_kwargs",
    "classify": "prompts * pooling_params use_tqdm lora_request tokenization_kwargs",
    "score": "* use_tqdm pooling_params lora_request tokenization_kwargs chat_template",
}
WEIGHTS = dict.fromkeys(
    (
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_weight_update",
        *("start_draft_weight_update", "update_weights", "finish_weight_update", "update_weight_version"),
        "get_weight_version",
    )
)
SLEEP = {"sleep": None, "wake_up": None, "release_kv_cache_memory": None}
LORA = {"add_lora": "lora_request", "remove_lora": "lora_id", "list_loras": "", "pin_lora": None}
MEDIA = {"reset_mm_cache": ""}
SHARED = {
    "get_tokenizer": "",
    "get_metrics": "",
    "stop_profile": "",
    "collective_rpc": RPC,
    "reset_prefix_cache": RESET,
}

METHODS: dict[str, dict[str, str | None]] = {
    "LLM": {
        **SHARED,
        "from_engine_args": "engine_args",
        "get_world_size": "include_dp",
        "get_default_sampling_params": "",
        "generate": f"prompts sampling_params * {GENERATE}",
        "enqueue": "prompts sampling_params lora_request priority use_tqdm tokenization_kwargs mm_processor_kwargs",
        "wait_for_completion": "output_type * use_tqdm",
        "apply_model": "func",
        "chat": CHAT,
        "enqueue_chat": CHAT,
        "beam_search": "prompts params lora_request use_tqdm concurrency_limit",
        "start_profile": PROFILE,
        **(POOLING | WEIGHTS | SLEEP | MEDIA),
    },
    "LLMEngine": {
        **SHARED,
        "from_engine_args": "engine_args usage_context stat_loggers enable_multiprocessing",
        "get_num_unfinished_requests": "",
        "has_unfinished_requests": "",
        "get_supported_tasks": "",
        "abort_request": "request_ids internal",
        "add_request": "request_id prompt params arrival_time lora_request tokenization_kwargs trace_headers priority "
        "session_id prompt_text kv_hints",
        "step": "",
        "apply_model": "func",
        "start_profile": PROFILE,
        "do_log_stats": "",
        "do_log_stats_with_interval": None,
        "from_vllm_config": None,
        "has_unfinished_requests_dp": None,
        "reset_encoder_cache": None,
        "is_sleeping": None,
        "set_weight_version": None,
        "get_weight_version": None,
        **(SLEEP | LORA | MEDIA),
    },
    "AsyncLLM": {
        **(SHARED | {"get_metrics": ""}),
        "from_engine_args": "engine_args start_engine_loop usage_context stat_loggers",
        "shutdown": "timeout",
        "get_num_unfinished_requests": "",
        "get_supported_tasks": "",
        "generate": "prompt sampling_params request_id * prompt_text lora_request tokenization_kwargs trace_headers "
        "priority data_parallel_rank session_id kv_hints reasoning_ended reasoning_parser_kwargs",
        "abort": "request_id internal",
        "is_tracing_enabled": "",
        "do_log_stats": "",
        "check_health": "",
        "start_profile": PROFILE,
        "encode": "prompt pooling_params request_id lora_request trace_headers priority tokenization_kwargs "
        "reasoning_ended",
        **dict.fromkeys(("from_vllm_config", "add_request", "get_num_queued_tokens", "check_admission")),
        **dict.fromkeys(("notify_kv_transfer_request_rejected", "pause_generation", "resume_generation", "is_paused")),
        **dict.fromkeys(("reset_encoder_cache", "is_sleeping", "checkpoint_prepare", "checkpoint_restore")),
        **dict.fromkeys(("compute_weight_checksums", "wait_for_requests_to_drain", "scale_elastic_ep", "handle_fault")),
        **dict.fromkeys(("get_status", "get_kv_event_sources")),
        **(WEIGHTS | SLEEP | LORA | MEDIA),
    },
}
"""Parameters by method, in vLLM's order; keyword-only ones after a star. None: Quire has no such method."""

PROPERTIES = {
    "LLMEngine": ("tokenizer",),
    "AsyncLLM": ("tokenizer", "vllm_config", "model_config", "is_running", "is_stopped", "errored", "dead_error"),
}

SAMPLING_PARAMS = [
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "watermarking",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "stream_interval",
    "skip_clone",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "extra_args",
    "bad_words",
    "skip_reading_prefix_cache",
    "thinking_token_budget",
    "repetition_detection",
    "routed_experts_prompt_start",
    "trace_decode_token_ids",
]

OUTPUTS = {
    "RequestOutput": "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics num_cached_tokens "
    "prompt_token_id_logprobs",
    "CompletionOutput": "index text token_ids cumulative_logprob logprobs finish_reason stop_reason",
    "BeamSearchParams": "beam_width max_tokens ignore_eos temperature length_penalty include_stop_str_in_output "
    "structured_outputs skip_special_tokens watermarking",
    "StructuredOutputsParams": "json regex choice grammar json_object disable_any_whitespace "
    "disable_additional_properties whitespace_pattern structural_tag",
}

ALWAYS_NONE = {
    "RequestOutput": "lora_request encoder_prompt encoder_prompt_token_ids num_cache_creation_tokens "
    "kv_transfer_params ec_transfer_params",
    "CompletionOutput": "routed_experts lora_request sampling_mask spec_decode_metrics weight_versions",
}

LLM_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("runner", "convert", "tokenizer_mode", "dtype"), "auto"),
    **dict.fromkeys(
        ("skip_tokenizer_init", "trust_remote_code", "enforce_eager", "enable_return_routed_experts"), False
    ),
    **dict.fromkeys(("return_sampling_mask", "disable_custom_all_reduce"), False),
    **dict.fromkeys(("tokenizer", "allowed_media_domains", "quantization", "revision", "tokenizer_revision")),
    **dict.fromkeys(("offload_params", "hf_token", "hf_overrides", "mm_processor_kwargs", "pooler_config")),
    **dict.fromkeys(("structured_outputs_config", "profiler_config", "attention_config", "kv_cache_memory_bytes")),
    **dict.fromkeys(("compilation_config", "quantization_config", "logits_processors", "spec_method", "spec_model")),
    "spec_tokens": None,
    "allowed_local_media_path": "",
    "tensor_parallel_size": 1,
    "seed": 0,
    "gpu_memory_utilization": 0.92,
    "cpu_offload_gb": 0,
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "swap_space": 0,
    "disable_log_stats": True,
}
"""The defaults of vLLM's `LLM(...)`, and two that older programs give: a program may write any of them down."""

EXPORTED = [
    "LLM",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "SamplingParams",
    "RequestOutput",
    "CompletionOutput",
    "PoolingParams",
    "ScoringRequestOutput",
    "ScoringOutput",
    "ClassificationRequestOutput",
    "ClassificationOutput",
    "EmbeddingRequestOutput",
    "EmbeddingOutput",
    "PoolingRequestOutput",
    "PoolingOutput",
    "LLMEngine",
    "EngineArgs",
    "AsyncLLMEngine",
    "AsyncEngineArgs",
    "__version__",
    "__version_tuple__",
]
NOT_EXPORTED = [
    "ModelRegistry",
    "initialize_ray_cluster",
]
MODULES = {
    "sampling_params": "SamplingParams StructuredOutputsParams BeamSearchParams RequestOutputKind "
    "RepetitionDetectionParams GuidedDecodingParams",
    "outputs": "RequestOutput CompletionOutput PoolingOutput PoolingRequestOutput EmbeddingOutput "
    "EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput",
    "pooling_params": "PoolingParams",
    "config": "PoolerConfig",
    "logprobs": "Logprob FlatLogprobs PromptLogprobs SampleLogprobs",
    "inputs": "PromptType TextPrompt TokensPrompt EmbedsPrompt",
    "engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints.llm": "LLM",
    "lora.request": "LoRARequest",
    "utils": "FlexibleArgumentParser random_uuid",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics.reader": "Counter Gauge Histogram Metric Vector",
}


@pytest.mark.parametrize(
    ("owner", "method"), [(owner, method) for owner, methods in METHODS.items() for method in methods]
)
def test_a_method_has_vllms_parameters_in_vllms_order_or_a_reason(owner: str, method: str) -> None:
    kind = getattr(quire, owner)
    expected = METHODS[owner][method]
    if expected is None:
        assert not hasattr(kind, method)
        assert ": " in explain(kind, method)
        return
    found = [each for each in inspect.signature(getattr(kind, method)).parameters.values() if each.name != "self"]
    plain = [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    keywords = {each.name for each in found if each.kind is each.KEYWORD_ONLY}
    positional, _, named = expected.partition("*")
    assert plain[: len(positional.split())] == positional.split()
    assert set(named.split()) <= keywords


@pytest.mark.parametrize("owner", PROPERTIES)
def test_properties(owner: str) -> None:
    for name in PROPERTIES[owner]:
        assert isinstance(inspect.getattr_static(getattr(quire, owner), name), property)


def test_sampling_params_have_vllms_fields_in_vllms_order() -> None:
    names = list(quire.SamplingParams.__struct_fields__)
    assert names[: len(SAMPLING_PARAMS)] == SAMPLING_PARAMS
    assert list(inspect.signature(quire.SamplingParams).parameters)[: len(SAMPLING_PARAMS)] == SAMPLING_PARAMS


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_and_parameters_have_vllms_fields(name: str) -> None:
    assert set(OUTPUTS[name].split()) <= set(getattr(quire, name).__struct_fields__)


def test_the_parameters_of_a_beam_search_have_vllms_order() -> None:
    names = OUTPUTS["BeamSearchParams"].split()
    assert list(quire.BeamSearchParams.__struct_fields__)[: len(names)] == names
    assert quire.BeamSearchParams(3, 8, True, 0.0, 0.5).length_penalty == 0.5


def test_what_quire_never_has_is_none_in_its_outputs() -> None:
    completion = quire.CompletionOutput(index=0)
    outputs = {
        "CompletionOutput": completion,
        "RequestOutput": quire.RequestOutput(
            request_id="0", prompt=None, prompt_token_ids=[], outputs=[completion], finished=True
        ),
    }
    for name, attributes in ALWAYS_NONE.items():
        assert [getattr(outputs[name], each) for each in attributes.split()] == [None] * len(attributes.split())


def test_a_completion_tells_by_a_method_whether_it_has_finished() -> None:
    assert quire.CompletionOutput(index=0, finish_reason="stop").finished() is True
    assert quire.CompletionOutput(index=0).finished() is False


def test_the_defaults_of_vllms_llm_are_accepted() -> None:
    resolved = read_keywords({"model": "x", **LLM_DEFAULTS})
    ours = read_keywords({"model": "x", "disable_log_stats": True, "gpu_memory_utilization": 0.92})
    assert msgspec.to_builtins(resolved) == msgspec.to_builtins(ours)
    assert isinstance(resolved, EngineArgs)


def test_public_names() -> None:
    for name in EXPORTED:
        assert name in quire.__all__
        assert getattr(quire, name)
    assert quire.AsyncLLMEngine is quire.AsyncLLM
    assert quire.AsyncEngineArgs is quire.EngineArgs
    for name in NOT_EXPORTED:
        with pytest.raises(AttributeError, match=f"{name}': "):
            getattr(quire, name)
    assert all(getattr(quire, name) is not None for name in quire.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_programs_import_from(name: str) -> None:
    module = importlib.import_module(f"quire.{name}")
    assert set(MODULES[name].split()) <= set(module.__all__)
    assert all(hasattr(module, each) for each in module.__all__)


def test_importing_them_imports_no_torch() -> None:
    names = ", ".join(f"quire.{name}" for name in MODULES)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
