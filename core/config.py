"""Every engine option, written once: type, default, range, choices and help live on the field.

Command-line flags, YAML keys, Python keywords, the documentation and validation all derive from these Structs.
`EngineArgs` is what a user wrote; `EngineConfig` is what it was resolved to, once, in `frontend/launch.py`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from quire.core.errors import ConfigError
from quire.core.structured_outputs import GrammarBackend

# `extra` keys read by the command line: `aliases` are other spellings of the flag; `parse` is "human_int" (1k = 1000,
# 1K = 1024), "human_int_or_auto" (also "auto" and -1) or "json" (an object, whole or by dotted keys);
# `value_optional` lets the flag stand alone, which leaves the field None.


Positive = Annotated[int, Meta(ge=1)]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The checkpoint and how to read it."""

    model: Annotated[
        str | None, Meta(description="Folder or hub id of the checkpoint; the embedded demo model when left out.")
    ] = None
    tokenizer: Annotated[str | None, Meta(description="Folder or hub id of the tokenizer, if not the model's own.")] = (
        None
    )
    skip_tokenizer_init: Annotated[bool, Meta(description="Run on token ids alone; text in or out is refused.")] = False
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of the model on the hub.")] = None
    tokenizer_revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of the tokenizer on the hub.")
    ] = None
    hf_token: Annotated[
        str | None,
        Meta(
            description="Token for gated repositories on the hub; without a value, the one that `hf auth login` saved.",
            extra={"value_optional": True},
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None, Meta(description="Names that clients may use for the model; the first one is reported.")
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "float", "half"],
        Meta(description="Type of weights and activations; auto takes the checkpoint's own."),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Meta(
            description="Longest prompt plus output in tokens; auto (-1) takes what fits in memory, "
            "unset takes the checkpoint's own limit.",
            extra={"parse": "human_int_or_auto"},
        ),
    ] = None
    seed: Annotated[int, Meta(description="Seeds dummy weights and the seeds drawn for requests that bring none.")] = 0
    max_logprobs: Annotated[
        int, Meta(ge=-1, description="Most logprobs a request may ask for; -1 lifts the limit.")
    ] = 20
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(
            description="What is returned as logprobs: log-probabilities or logits, of the model itself (raw) or after "
            "penalties, masks, temperature and cuts (processed)."
        ),
    ] = "raw_logprobs"
    generation_config: Annotated[
        str,
        Meta(
            description="Source of default sampling parameters: auto (the model's folder), vllm (none), or a folder, "
            "whose max_new_tokens then limits every request to a server."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any],
        Meta(
            description="Default sampling parameters that win over the model's own; max_new_tokens limits every "
            "request to a server.",
            extra={"parse": "json"},
        ),
    ] = {}
    enable_prompt_embeds: Annotated[
        bool, Meta(description="Take prompts as embeddings too, in prompt_embeds: a safetensors file in base64.")
    ] = False
    logits_processors: Annotated[
        list[str] | None,
        Meta(
            description="Subclasses of quire.LogitsProcessor that workers load, as module:Class; they change logits "
            "before penalties."
        ),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any],
        Meta(description="Values that replace those of the checkpoint's config.json.", extra={"parse": "json"}),
    ] = {}


class LoadConfig(Struct, frozen=True, kw_only=True):
    """Where weights come from."""

    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Meta(description="auto and safetensors read *.safetensors; dummy draws random weights from --seed."),
    ] = "auto"
    download_dir: Annotated[str | None, Meta(description="Cache folder for hub downloads.")] = None
    use_tqdm_on_load: Annotated[bool, Meta(description="Show a progress bar while weights load, on a terminal.")] = True


class CacheConfig(Struct, frozen=True, kw_only=True):
    """Memory for the KV cache and what is kept in it."""

    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, Meta(description="Tokens per page; 16 when unset.")
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of the device's memory for weights, workspace and KV cache (of free RAM on a CPU).",
            extra={"aliases": ["--device-memory-utilization"]},
        ),
    ] = 0.92
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        Meta(
            description="KV-cache bytes per worker; wins over --gpu-memory-utilization.", extra={"parse": "human_int"}
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(description="Type of cached keys and values; auto is the model's."),
    ] = "auto"
    num_gpu_blocks_override: Annotated[
        Positive | None, Meta(description="Use exactly this many pages, on any device; for tests of preemption.")
    ] = None
    enable_prefix_caching: Annotated[
        bool | None, Meta(description="Reuse pages of prompts that begin alike; on when unset.")
    ] = None
    prefix_caching_hash_algo: Annotated[
        Literal["sha256"],
        Meta(description="Hash that names a page's content; collision-resistant, so nobody can forge a hit."),
    ] = "sha256"


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Which request runs next, and for how many tokens."""

    max_num_batched_tokens: Annotated[
        Positive | None,
        Meta(
            description="Most tokens in one step; by device and entry point when unset.", extra={"parse": "human_int"}
        ),
    ] = None
    max_num_seqs: Annotated[
        Positive | None, Meta(description="Most requests running at once; by device when unset.")
    ] = None
    max_num_queued_reqs: Annotated[
        Positive | None, Meta(description="Most requests waiting; past it a request is answered 429 with Retry-After.")
    ] = None
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="Most prompt tokens that one request gets in a step; 0 means no limit.")
    ] = 0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], Meta(description="First come first served, or lowest priority value first.")
    ] = "fcfs"
    stream_interval: Annotated[
        int, Meta(ge=1, description="Tokens per event of a stream; its first and its last come at once.")
    ] = 1
    enable_chunked_prefill: Annotated[
        bool | None, Meta(description="Split long prompts over steps; on when unset.")
    ] = None
    async_scheduling: Annotated[
        bool | None, Meta(description="Plan the next step before the last one's tokens are back; on when unset.")
    ] = None


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """How one model is spread over workers."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, description="Workers that each hold a shard of every layer.", extra={"aliases": ["-tp"]})
    ] = 1
    distributed_executor_backend: Annotated[
        Literal["uni", "mp"] | None,
        Meta(
            description="uni runs the worker in the engine process, mp gives each its own; by worker count when unset."
        ),
    ] = None
    engine_transport: Annotated[
        Literal["ipc", "tcp"],
        Meta(description="How frontend and engine talk: sockets in a private folder, or encrypted TCP on loopback."),
    ] = "ipc"


class DeviceConfig(Struct, frozen=True, kw_only=True):
    """The accelerator."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs; auto prefers an accelerator.")
    ] = "auto"


class ProfilerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recorder of timelines: which, and the folder that its files go to."""

    profiler: Literal["torch"] | None = None
    torch_profiler_dir: str = ""

    def __post_init__(self) -> None:
        if self.profiler is not None and not self.torch_profiler_dir:
            raise ValueError("torch_profiler_dir must name a folder")


class ObservabilityConfig(Struct, frozen=True, kw_only=True):
    """What is logged and counted."""

    disable_log_stats: Annotated[bool, Meta(description="Neither collect nor log engine statistics.")] = False
    enable_log_requests: Annotated[bool, Meta(description="Log one line for each request.")] = False
    profiler_config: Annotated[
        ProfilerConfig | None,
        Meta(
            description='Record timelines of engine and worker: {"profiler": "torch", "torch_profiler_dir": "DIR"}; '
            "POST /start_profile and /stop_profile.",
            extra={"parse": "json"},
        ),
    ] = None


class StructuredOutputsOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How outputs are held to schemas and grammars, where a request does not say it itself."""

    backend: GrammarBackend = "auto"
    disable_fallback: bool = False  # auto is xgrammar alone
    disable_any_whitespace: bool = False  # JSON in one line
    disable_additional_properties: bool = False  # JSON objects hold only what their schema names


class StructuredOutputsConfig(Struct, frozen=True, kw_only=True):
    """Outputs that match a schema or a grammar."""

    structured_outputs_config: Annotated[
        StructuredOutputsOptions | None,
        Meta(
            description="Grammar backend (auto, xgrammar, guidance, outlines, lm-format-enforcer), disable_fallback, "
            "disable_any_whitespace and disable_additional_properties, as JSON or by dotted keys.",
            extra={"parse": "json"},
        ),
    ] = None


class EngineArgs(Struct, frozen=True, kw_only=True):
    """All engine options as a user wrote them, by group."""

    model: ModelConfig = ModelConfig()
    load: LoadConfig = LoadConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    device: DeviceConfig = DeviceConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()

    @classmethod
    def from_flat(cls, **options: Any) -> "EngineArgs":
        """Builds the groups from keywords such as `model=`, `max_num_seqs=`, checked and converted by type.

        Raises:
            ConfigError: an unknown keyword or a value out of range, by name.
        """
        if isinstance(options.get("served_model_name"), str):
            options["served_model_name"] = [options["served_model_name"]]
        groups = {}
        for group in msgspec.structs.fields(cls):
            names = {field.name for field in msgspec.structs.fields(group.type)}
            chosen = {name: options.pop(name) for name in list(options) if name in names}
            groups[group.name] = convert_group(group.type, chosen)
        if options:
            raise ConfigError(f"Unknown engine option {sorted(options)[0]!r}; `quire serve --help=all` lists them.")
        return cls(**groups)

    def flat(self) -> dict[str, Any]:
        """All options as keywords for `from_flat`."""
        groups = (getattr(self, group.name) for group in msgspec.structs.fields(self))
        return {name: value for group in groups for name, value in msgspec.structs.asdict(group).items()}


def convert_group(kind: type, values: dict[str, Any]) -> Any:
    """`values` as the options Struct `kind`; a wrong one raises ConfigError that names the option."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        name = text.split("`$.")[-1].split("`")[0].split("[")[0] if "`$." in text else kind.__name__
        raise ConfigError(f"{name}: {text.split(' - at')[0]} (got {values.get(name)!r}).") from None


# ------------------------------------------------------------------------------------------------------- resolved


class ModelSpec(Struct, frozen=True, kw_only=True):
    """Facts about the checkpoint that engine and workers share, read once from its folder.

    `hf_config` is config.json with overrides applied; model files read architecture details from it.
    """

    path: str  # local folder
    name: str  # as the user wrote it
    architecture: str
    hf_config: dict[str, Any]
    dtype: Literal["bfloat16", "float16", "float32"]
    vocab_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: list[int]


class SchedulerLimits(Struct, frozen=True, kw_only=True):
    """`SchedulerConfig` and the paging half of `CacheConfig` with every default filled in."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int | None = None
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    block_size: int = 16
    enable_prefix_caching: bool = True


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Everything that an engine process and its workers need, resolved; sent to each as MessagePack."""

    spec: ModelSpec
    limits: SchedulerLimits
    load: LoadConfig
    cache: CacheConfig
    device: Literal["cpu", "cuda"]
    tensor_parallel_size: int
    executor: Literal["uni", "mp"]
    max_model_len: int  # tokens; when `fit_max_model_len`, an upper bound that the memory plan may lower
    fit_max_model_len: bool
    seed: int
    log_stats: bool = True
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: list[str] = []  # module:Class
    trace_folder: str | None = None  # where timelines are written; None records none
    first_touch_seconds: float = 1.0  # that start-up may spend on having the KV cache's memory at hand; CPUs only
