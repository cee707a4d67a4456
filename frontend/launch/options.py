"""Resolves options: the user's `EngineArgs` and the checkpoint's facts become the `EngineConfig` that runs."""

import os
from typing import Literal

import msgspec
import psutil

from quire.core import envs
from quire.core.config.engine_args import EngineArgs
from quire.core.config.lora import AdapterOptions
from quire.core.config.observability import ProfilerConfig
from quire.core.config.parallel import EplbConfig
from quire.core.config.pooling import PoolingSpec
from quire.core.config.quantization import Quantization
from quire.core.config.resolved import EngineConfig, ModelSpec, SchedulerLimits
from quire.core.errors import ConfigError
from quire.core.wire.rank import EnginePlace, Layout
from quire.core.wire.sampling_params import MAX_COMPLETIONS
from quire.frontend.launch import device
from quire.frontend.launch.graphs import check_attention_backend, resolve_graphs
from quire.frontend.launch.layout import (
    check_heads,
    check_sharing,
    divide_engines,
    engine_places,
    expert_placement,
    layout_of,
    served_engines,
)
from quire.frontend.launch.media import reads_media
from quire.frontend.launch.pipeline_stages import divide_layers
from quire.frontend.launch.pooling import resolve_pooling
from quire.frontend.launch.speculation import resolve_speculation

UsageContext = Literal["llm", "server"]
DEFAULT_BLOCK_SIZE = 16
LARGE_GPU_BYTES = 70 * 2**30


def resolve(
    args: EngineArgs,
    spec: ModelSpec,
    usage: UsageContext,
    *,
    gpu_bytes: int | None = None,
    draft: ModelSpec | None = None,
) -> EngineConfig:
    """Fills in every default.

    Args:
        gpu_bytes: memory of a GPU to resolve for, which need not be in this machine; None: this machine's device.
        draft: what `read_draft` has read of the checkpoint that drafts come from.

    Raises:
        ConfigError: options that contradict each other or the checkpoint.
    """
    kind = device.choose(args.device.device) if gpu_bytes is None else "cuda"
    args = msgspec.structs.replace(args, parallel=divide_engines(args.parallel))
    layout = layout_of(args.parallel)
    is_alone = layout.num_workers == 1 and not layout.shares_experts
    backend = args.parallel.distributed_executor_backend or ("uni" if is_alone else "mp")
    executor: Literal["uni", "mp"] = "uni" if backend == "uni" else "mp"  # Ray starts nodes, not workers
    if executor == "uni" and not is_alone:
        raise ConfigError(
            "--distributed-executor-backend uni runs one worker by itself, and the options ask for several that work "
            "together; use mp."
        )
    if layout.shares_experts:
        check_sharing(args)
    check_heads(layout.tensor, spec.num_attention_heads)
    check_attention_backend(args.device.attention_backend, kind)
    profiler = _absolute(args.observability.profiler_config)
    pooling = resolve_pooling(args.model, spec)
    max_model_len, fit = _max_model_len(args.model.max_model_len, spec, pooling)
    if spec.embeds_images:
        _check_two_encoders(args, spec, pooling, max_model_len)
    defaults = _batch_defaults(usage, kind, layout.num_workers, gpu_bytes)
    if spec.encoder is not None:
        if pooling is not None:
            raise ConfigError(
                f"{spec.name} has an encoder and a decoder and generates text; leave out --runner and --convert."
            )
        spec = _with_encoder_limit(spec, max_model_len, layout)
    speculation, draft_model = resolve_speculation(args, spec, layout, pooling, draft)
    adapters = _adapters(args, spec, pooling)
    limits = _limits(args, defaults, max_model_len, spec, adapters, is_server=usage == "server")
    if draft_model is not None:
        limits = msgspec.structs.replace(limits, num_lookahead_tokens=draft_model.num_tokens)
    return EngineConfig(
        spec=spec,
        limits=limits,
        load=args.load,
        cache=args.cache,
        device=kind,
        layout=layout,
        place=next(iter(engine_places(args.parallel)), EnginePlace()),  # each engine gets its own
        served_engines=served_engines(args.parallel),
        executor=executor,
        layers_by_stage=divide_layers(spec.num_layers, layout.pipeline, envs.read("PP_LAYER_PARTITION")),
        max_model_len=max_model_len,
        fit_max_model_len=fit,
        seed=args.model.seed,
        quantization=_quantization(args),
        pooling=pooling,
        reads_media=reads_media(args.multimodal, spec, layout),
        tower_mode=args.multimodal.mm_encoder_tp_mode,
        plans_towers=not args.multimodal.skip_mm_profiling,
        speculation=speculation,
        draft_model=draft_model,
        adapters=adapters,
        expert_placement=expert_placement(args.parallel),
        cp_kv_cache_interleave_size=args.parallel.cp_kv_cache_interleave_size or 1,
        eplb=(args.parallel.eplb_config or EplbConfig()) if args.parallel.enable_eplb else None,
        log_stats=not args.observability.disable_log_stats,
        aggregate_engine_logging=args.observability.aggregate_engine_logging,
        keeps_spare=_keeps_spare(args, layout, usage),
        enforce_eager=args.device.enforce_eager,
        graphs=resolve_graphs(args.device, kind, limits.max_num_batched_tokens),
        logprobs_mode=args.model.logprobs_mode,
        logits_processors=args.model.logits_processors or [],
        allow_insecure_serialization=args.parallel.allow_insecure_serialization
        or envs.read_flag("ALLOW_INSECURE_SERIALIZATION"),
        logging=args.observability.logging,
        flight_recorder=_flight_recorder(args.observability.flight_recorder),
        trace_folder=profiler.torch_profiler_dir if profiler.profiler == "timeline" else None,
        torch_profile=profiler if profiler.profiler == "torch" else None,
        # Offline work has all its requests at the start; a server's first ones are seldom many.
        first_touch_seconds=4.0 if usage == "llm" else 1.0,
    )


def _adapters(args: EngineArgs, spec: ModelSpec, pooling: PoolingSpec | None) -> AdapterOptions | None:
    """The room for adapters that requests bring, or for those among the weights; the layers have one kind of them."""
    tasks = None if pooling is None else pooling.task_adapters
    if tasks is None or tasks.is_fixed:
        if args.lora.enable_lora and spec.encoder is not None:
            raise ConfigError(
                "--enable-lora: adapters of models with an encoder and a decoder are not served; merge the adapter."
            )
        return AdapterOptions.of(args.lora)
    if args.lora.enable_lora:
        raise ConfigError(
            "--enable-lora is for adapters in folders, and the weights of this checkpoint have one for each task; "
            "leave it out, or choose a task with --hf-overrides '{\"jina_task\": ...}'."
        )
    return tasks.options()


def _keeps_spare(args: EngineArgs, layout: Layout, usage: UsageContext) -> bool:
    asked, is_spread = args.recovery.enable_warm_spare, layout.nodes > 1 or layout.shares_experts
    if asked and is_spread:
        raise ConfigError(
            "--enable-warm-spare is for engines of one host that share no experts: the ranks of others meet anew at "
            "each start. Leave it out."
        )
    return not is_spread and usage == "server" if asked is None else asked


def _quantization(args: EngineArgs) -> Quantization | None:
    asked = args.model.quantization or ("bitsandbytes" if args.load.load_format == "bitsandbytes" else None)
    if args.model.quantization_config is not None:
        return args.model.quantization_config.over(asked)
    if asked == "online":
        raise ConfigError("--quantization online needs --quantization-config; or name a format, such as int8.")
    return asked


def _absolute(profiler: ProfilerConfig | None) -> ProfilerConfig:
    """The profiler's settings with an absolute folder, for other processes."""
    profiler = profiler or ProfilerConfig()
    return msgspec.structs.replace(profiler, torch_profiler_dir=os.path.abspath(profiler.torch_profiler_dir))


def _flight_recorder(place: str | None) -> str | None:
    return place if place in (None, "off") else os.path.abspath(os.path.expanduser(place))


def _check_two_encoders(args: EngineArgs, spec: ModelSpec, pooling: PoolingSpec | None, max_model_len: int) -> None:
    """Refuses options that a model with encoders of texts and of images cannot heed."""
    if pooling is None or not pooling.embeds or pooling.sequence != "LAST" or pooling.enable_chunked_processing:
        raise ConfigError(
            f"{spec.name} makes vectors of whole texts and images; leave out --convert classify, other kinds of "
            "pooling, and enable_chunked_processing."
        )
    if pooling.fills_to > max_model_len:
        raise ConfigError(
            f"--max-model-len {max_model_len}: texts of {spec.name} are filled up to {pooling.fills_to} tokens; leave "
            "it out."
        )
    if args.model.enable_prompt_embeds:
        raise ConfigError(f"--enable-prompt-embeds: {spec.name} takes texts and images; leave it out.")


def _max_model_len(asked: int | None, spec: ModelSpec, pooling: PoolingSpec | None) -> tuple[int, bool]:
    """(limit in tokens, whether the memory plan may lower it)."""
    if asked is None or asked == -1:
        most = spec.max_position_embeddings
        if pooling is not None and spec.sentence is not None and spec.sentence.max_seq_length is not None:
            most = min(most, spec.sentence.max_seq_length)
        return most, asked == -1
    if asked > spec.max_position_embeddings and not envs.read_flag("ALLOW_LONG_MAX_MODEL_LEN"):
        raise ConfigError(
            f"--max-model-len {asked} exceeds the checkpoint's own limit of {spec.max_position_embeddings} tokens. "
            "Lower it, or set QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1 if the model is known to extrapolate."
        )
    if asked < 1:
        raise ConfigError(f"--max-model-len must be at least 1, or -1 for what fits in memory; got {asked}.")
    return asked, False


def _with_encoder_limit(spec: ModelSpec, max_model_len: int, layout: Layout) -> ModelSpec:
    """Bounds the encoder's inputs by --max-model-len, as the decoder's sequences, where their lengths differ.

    Raises:
        ConfigError: pipeline stages, or ranks that divide positions.
    """
    assert spec.encoder is not None
    if layout.pipeline > 1 or layout.sequence > 1:
        raise ConfigError(
            f"{spec.name} has an encoder and a decoder, which are divided by --tensor-parallel-size alone; leave out "
            "--pipeline-parallel-size, --decode-context-parallel-size and --prefill-context-parallel-size."
        )
    if spec.encoder.reads_features:
        return spec
    max_rows = min(spec.encoder.max_rows, max_model_len)
    return msgspec.structs.replace(spec, encoder=msgspec.structs.replace(spec.encoder, max_rows=max_rows))


def _limits(
    args: EngineArgs,
    defaults: tuple[int, int],
    max_model_len: int,
    spec: ModelSpec,
    adapters: AdapterOptions | None,
    *,
    is_server: bool,
) -> SchedulerLimits:
    asked = args.scheduler
    factor = 2 if args.device.performance_mode == "throughput" else 1
    default_tokens, default_seqs = (factor * default for default in defaults)
    chunked = asked.enable_chunked_prefill is not False
    max_num_seqs = asked.max_num_seqs or default_seqs
    tokens = asked.max_num_batched_tokens
    if tokens is None:
        is_whole = spec.is_encoder or not chunked  # a step computes a prompt of full length
        tokens = max(default_tokens, max_model_len) if is_whole else default_tokens
        tokens = max(1, min(tokens, max_num_seqs * max_model_len))
        if spec.encoder is not None:  # and encodes an input of full length beside the tokens of others
            tokens = max(tokens, spec.encoder.max_rows + max_num_seqs)
    if asked.max_num_seqs is None:
        max_num_seqs = min(max_num_seqs, tokens)
    if spec.encoder is not None and spec.encoder.reads_features and tokens <= spec.encoder.max_rows:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is too low: one step encodes a whole input, which has "
            f"{spec.encoder.max_rows} rows, beside a token; raise it above {spec.encoder.max_rows}."
        )
    if not chunked and tokens < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is below the model length {max_model_len}, so a long prompt could "
            "never run whole: raise it, lower --max-model-len, or leave chunked prefill on."
        )
    if not chunked and asked.long_prefill_token_threshold:
        raise ConfigError("--long-prefill-token-threshold splits prompts, which --no-enable-chunked-prefill forbids.")
    block_size, run = args.cache.block_size or DEFAULT_BLOCK_SIZE, args.parallel.cp_kv_cache_interleave_size or 1
    num_ranks = args.parallel.decode_context_parallel_size * args.parallel.prefill_context_parallel_size
    if block_size % run:
        raise ConfigError(
            f"--cp-kv-cache-interleave-size {run} does not divide --block-size {block_size}; choose a divisor."
        )
    if run > 1 and num_ranks == 1:
        raise ConfigError(
            "--cp-kv-cache-interleave-size has no effect without --decode-context-parallel-size or "
            "--prefill-context-parallel-size above 1."
        )
    block_size *= num_ranks  # each rank has --block-size slots of a page
    caching = args.cache.enable_prefix_caching is not False
    _check_snapshots(args.cache.mamba_block_size, block_size, caching=caching)
    queued_requests, queued_tokens, queued_bytes = _queue_bounds(psutil.virtual_memory().total)
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        max_num_queued_reqs=asked.max_num_queued_reqs or (queued_requests if is_server else None),
        max_num_queued_tokens=asked.max_num_queued_tokens or (queued_tokens if is_server else None),
        max_num_queued_bytes=asked.max_num_queued_bytes or (queued_bytes if is_server else None),
        max_queue_seconds=asked.max_queue_seconds if is_server else 0,
        priority_aging_seconds=asked.priority_aging_seconds,
        long_prefill_slowdown=asked.long_prefill_slowdown,
        long_prefill_token_threshold=asked.long_prefill_token_threshold,
        policy=asked.scheduling_policy,
        enable_chunked_prefill=chunked,
        async_scheduling=asked.async_scheduling is not False,
        block_size=block_size,
        enable_prefix_caching=caching,
        prefix_caching_hash_algo=args.cache.prefix_caching_hash_algo,
        max_adapters=0 if adapters is None else adapters.max_adapters,
        max_adapters_on_host=0 if adapters is None else adapters.max_on_host,
    )


def _queue_bounds(memory_bytes: int) -> tuple[int, int, int]:
    """(requests, prompt tokens, bytes) that may wait, so that they take a sixteenth of the memory each at most.

    A waiting sequence takes about 16 KiB in engine and frontend, and a token, a Python integer in both, 64 bytes.
    """
    share = memory_bytes // 16
    return max(2 * MAX_COMPLETIONS, share >> 14), max(1 << 20, share >> 6), max(1 << 28, share)


def _check_snapshots(interval: int | None, block_size: int, *, caching: bool) -> None:
    if interval is None:
        return
    if interval % block_size:
        raise ConfigError(
            f"--mamba-block-size {interval} is not a multiple of --block-size {block_size}; use "
            f"{-(-interval // block_size) * block_size}."
        )
    if not caching:
        raise ConfigError("--mamba-block-size is for the prefix cache, which --no-enable-prefix-caching turns off.")


def _batch_defaults(usage: UsageContext, kind: str, world_size: int, gpu_bytes: int | None) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) that vLLM would choose for this device and entry point.

    A server on a CPU takes a quarter of vLLM's 2048 tokens: running streams wait for a step with prompts in it, and a
    CPU computes as many tokens a second with steps of 512 tokens as with longer ones.
    """
    if kind == "cpu":
        tokens, seqs = (4096, 256) if usage == "llm" else (512, 128)
        return tokens * world_size, seqs * world_size
    if (gpu_bytes or device.gpu_memory_bytes()) >= LARGE_GPU_BYTES:
        return (16384 if usage == "llm" else 8192), 1024
    return (8192 if usage == "llm" else 2048), 256
