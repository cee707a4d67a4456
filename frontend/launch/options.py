"""Resolves options: the user's `EngineArgs` and the checkpoint's facts become the `EngineConfig` that runs."""

import os
from typing import Literal

import msgspec

from quire.core import envs
from quire.core.config.engine_args import EngineArgs
from quire.core.config.observability import ProfilerConfig
from quire.core.config.parallel import EplbConfig, ExpertPlacement, ParallelConfig
from quire.core.config.resolved import EngineConfig, ModelSpec, SchedulerLimits
from quire.core.errors import ConfigError
from quire.core.wire.rank import EnginePlace, Layout
from quire.frontend.launch import device
from quire.frontend.launch.stages import divide_layers

UsageContext = Literal["llm", "server"]
DEFAULT_BLOCK_SIZE = 16
LARGE_GPU_BYTES = 70 * 2**30


def resolve(args: EngineArgs, spec: ModelSpec, usage: UsageContext, *, gpu_bytes: int | None = None) -> EngineConfig:
    """Fills in every default.

    Args:
        gpu_bytes: memory of a GPU to resolve for, which need not be in this machine; None: this machine's device.

    Raises:
        ConfigError: options that contradict each other or the checkpoint.
    """
    kind = device.choose(args.device.device) if gpu_bytes is None else "cuda"
    layout = _layout(args.parallel)
    is_alone = layout.num_workers == 1 and not layout.shares_experts
    backend = args.parallel.distributed_executor_backend or ("uni" if is_alone else "mp")
    executor: Literal["uni", "mp"] = "uni" if backend == "uni" else "mp"  # Ray starts nodes, not workers
    if executor == "uni" and not is_alone:
        raise ConfigError(
            "--distributed-executor-backend uni runs one worker by itself, and the options ask for several that work "
            "together; use mp."
        )
    if layout.shares_experts:
        _check_sharing(args)
    _check_heads(layout.tensor, spec.num_attention_heads)
    profiler = _absolute(args.observability.profiler_config)
    max_model_len, fit = _max_model_len(args.model.max_model_len, spec)
    return EngineConfig(
        spec=spec,
        limits=_limits(args, _batch_defaults(usage, kind, layout.num_workers, gpu_bytes), max_model_len),
        load=args.load,
        cache=args.cache,
        device=kind,
        layout=layout,
        place=next(iter(engine_places(args.parallel)), EnginePlace()),  # each engine gets its own
        served_engines=_served_engines(args.parallel),
        executor=executor,
        layers_by_stage=divide_layers(spec.num_layers, layout.pipeline, envs.read("PP_LAYER_PARTITION")),
        max_model_len=max_model_len,
        fit_max_model_len=fit,
        seed=args.model.seed,
        quantization=args.model.quantization or ("bitsandbytes" if args.load.load_format == "bitsandbytes" else None),
        expert_placement=_expert_placement(args.parallel),
        cp_kv_cache_interleave_size=args.parallel.cp_kv_cache_interleave_size or 1,
        eplb=(args.parallel.eplb_config or EplbConfig()) if args.parallel.enable_eplb else None,
        log_stats=not args.observability.disable_log_stats,
        aggregate_engine_logging=args.observability.aggregate_engine_logging,
        logprobs_mode=args.model.logprobs_mode,
        logits_processors=args.model.logits_processors or [],
        allow_insecure_serialization=args.parallel.allow_insecure_serialization
        or envs.read_flag("ALLOW_INSECURE_SERIALIZATION"),
        logging=args.observability.logging,
        trace_folder=profiler.torch_profiler_dir if profiler.profiler == "timeline" else None,
        torch_profile=profiler if profiler.profiler == "torch" else None,
        # Offline work has all its requests at the start; a server's first ones are seldom many.
        first_touch_seconds=4.0 if usage == "llm" else 1.0,
    )


def engine_places(parallel: ParallelConfig) -> list[EnginePlace]:
    """The engines that this command runs on this host.

    Raises:
        ConfigError: the options contradict each other.
    """
    size, rank = parallel.data_parallel_size, parallel.data_parallel_rank
    local, start = parallel.data_parallel_size_local, parallel.data_parallel_start_rank
    if parallel.data_parallel_external_lb and rank is None:
        raise ConfigError("--data-parallel-external-lb: --data-parallel-rank must say which of the engines this is.")
    if rank is not None:
        if parallel.data_parallel_hybrid_lb or local not in (None, 1) or start not in (None, rank):
            raise ConfigError(
                "--data-parallel-rank runs that engine alone; leave out --data-parallel-hybrid-lb, "
                "--data-parallel-size-local and --data-parallel-start-rank."
            )
        if rank >= size:
            raise ConfigError(f"--data-parallel-rank {rank} must be below --data-parallel-size {size}.")
        return [EnginePlace(rank)]
    if parallel.data_parallel_hybrid_lb and not local:
        raise ConfigError("--data-parallel-hybrid-lb: --data-parallel-size-local must say how many engines run here.")
    if local == 0 and (size == 1 or parallel.headless):
        raise ConfigError("--data-parallel-size-local 0 is for node 0 of several engines, where other hosts run them.")
    first, number = start or 0, size if local is None else local
    if first + number > size:
        raise ConfigError(
            f"--data-parallel-start-rank {first} and {number} engines from there on exceed --data-parallel-size {size}."
        )
    return [EnginePlace(first + index, index, number) for index in range(number)]


def _layout(asked: ParallelConfig) -> Layout:
    tensor, context = asked.tensor_parallel_size, asked.decode_context_parallel_size
    layout = Layout(
        data=asked.data_parallel_size,
        pipeline=asked.pipeline_parallel_size,
        prefill=asked.prefill_context_parallel_size,
        tensor=tensor,
        context=context,
        expert=tensor * asked.data_parallel_size if asked.enable_expert_parallel else 1,
        nodes=asked.nnodes,
    )
    if layout.num_workers % layout.nodes:
        raise ConfigError(
            f"--nnodes {layout.nodes} does not divide the {layout.num_workers} workers of the model evenly; raise "
            "--tensor-parallel-size or --pipeline-parallel-size, or lower --nnodes."
        )
    if layout.nodes > 1 and layout.data > 1:
        raise ConfigError(
            "--nnodes spreads the workers of one engine, and --data-parallel-size asks for several engines: give "
            "one of the two."
        )
    if tensor % context:
        raise ConfigError(
            f"--decode-context-parallel-size {context} must divide --tensor-parallel-size {tensor}: it divides "
            "the cache of workers that hold the same KV heads."
        )
    if context > 1 and layout.prefill > 1:
        raise ConfigError(
            "--decode-context-parallel-size and --prefill-context-parallel-size both divide the positions of "
            "sequences: give one of the two."
        )
    return layout


def _check_sharing(args: EngineArgs) -> None:
    """Refuses what engines cannot do that hold one set of experts."""
    asked, sharing = args.parallel, "--enable-expert-parallel divides the experts over all engines"
    if asked.pipeline_parallel_size > 1 or asked.prefill_context_parallel_size > 1:
        raise ConfigError(
            f"{sharing}, which are divided by tensors alone then: use --tensor-parallel-size instead of "
            "--pipeline-parallel-size and --prefill-context-parallel-size, or drop --data-parallel-size."
        )
    if len(engine_places(asked)) < asked.data_parallel_size:
        raise ConfigError(
            f"{sharing}, and these must be on one host, behind one server: drop --data-parallel-rank, "
            "--data-parallel-hybrid-lb and --data-parallel-size-local, or --enable-expert-parallel."
        )
    if args.load.load_format == "sharded_state":
        raise ConfigError(
            f"{sharing}, and files of --load-format sharded_state are for one engine: serve the checkpoint itself."
        )


def remote_places(parallel: ParallelConfig) -> list[EnginePlace]:
    """The engines that this server uses and other hosts run."""
    if parallel.data_parallel_hybrid_lb or parallel.data_parallel_rank is not None:
        return []
    here = {place.data for place in engine_places(parallel)}
    return [EnginePlace(data) for data in range(parallel.data_parallel_size) if data not in here]


def _served_engines(parallel: ParallelConfig) -> tuple[int, ...]:
    return tuple(sorted(place.data for place in [*engine_places(parallel), *remote_places(parallel)]))


def _check_heads(world_size: int, num_heads: int) -> None:
    """Refuses what every layer would refuse, before as many processes are started.

    A model without attention counts as one head; its layers know what they can be divided into.
    """
    if num_heads > 1 and num_heads % world_size:
        divisors = [str(size) for size in range(1, num_heads + 1) if num_heads % size == 0]
        raise ConfigError(
            f"--tensor-parallel-size {world_size} does not divide the model's {num_heads} attention heads; "
            f"choose one of {', '.join(divisors)}."
        )


def _expert_placement(asked: ParallelConfig) -> ExpertPlacement | None:
    if not asked.enable_expert_parallel:
        if asked.enable_eplb:
            raise ConfigError("--enable-eplb places whole experts: give --enable-expert-parallel, too.")
        return None
    num_redundant = (asked.eplb_config or EplbConfig()).num_redundant_experts
    if num_redundant and not asked.enable_eplb:
        raise ConfigError("--eplb-config.num_redundant_experts has no effect without --enable-eplb: give it, too.")
    if asked.enable_eplb and asked.expert_placement_strategy != "linear":
        raise ConfigError("--enable-eplb places experts by their load; drop --expert-placement-strategy.")
    if asked.enable_eplb and asked.tensor_parallel_size * asked.data_parallel_size == 1:
        raise ConfigError(
            "--enable-eplb has nothing to balance on one worker: raise --tensor-parallel-size or --data-parallel-size."
        )
    return ExpertPlacement(strategy=asked.expert_placement_strategy, num_redundant=num_redundant)


def _absolute(profiler: ProfilerConfig | None) -> ProfilerConfig:
    """The profiler with its folder as other processes find it."""
    profiler = profiler or ProfilerConfig()
    return msgspec.structs.replace(profiler, torch_profiler_dir=os.path.abspath(profiler.torch_profiler_dir))


def _max_model_len(asked: int | None, spec: ModelSpec) -> tuple[int, bool]:
    """(limit in tokens, whether the memory plan may lower it)."""
    if asked is None or asked == -1:
        return spec.max_position_embeddings, asked == -1
    if asked > spec.max_position_embeddings and not envs.read_flag("ALLOW_LONG_MAX_MODEL_LEN"):
        raise ConfigError(
            f"--max-model-len {asked} exceeds the checkpoint's own limit of {spec.max_position_embeddings} tokens. "
            "Lower it, or set QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1 if the model is known to extrapolate."
        )
    if asked < 1:
        raise ConfigError(f"--max-model-len must be at least 1, or -1 for what fits in memory; got {asked}.")
    return asked, False


def _limits(args: EngineArgs, defaults: tuple[int, int], max_model_len: int) -> SchedulerLimits:
    asked = args.scheduler
    default_tokens, default_seqs = defaults
    chunked = asked.enable_chunked_prefill is not False
    max_num_seqs = asked.max_num_seqs or default_seqs
    tokens = asked.max_num_batched_tokens
    if tokens is None:
        tokens = default_tokens if chunked else max(default_tokens, max_model_len)
        tokens = max(1, min(tokens, max_num_seqs * max_model_len))
    if asked.max_num_seqs is None:
        max_num_seqs = min(max_num_seqs, tokens)
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
    block_size *= num_ranks  # a page has so many slots on each rank
    caching = args.cache.enable_prefix_caching is not False
    _check_snapshots(args.cache.mamba_block_size, block_size, caching=caching)
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        max_num_queued_reqs=asked.max_num_queued_reqs,
        long_prefill_token_threshold=asked.long_prefill_token_threshold,
        policy=asked.scheduling_policy,
        enable_chunked_prefill=chunked,
        async_scheduling=asked.async_scheduling is not False,
        block_size=block_size,
        enable_prefix_caching=caching,
        prefix_caching_hash_algo=args.cache.prefix_caching_hash_algo,
    )


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
