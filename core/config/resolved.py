"""`EngineArgs` with every default filled in, resolved once when an engine is launched."""

from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from quire.core.config.cache import CacheConfig, HashAlgorithm, KVCacheDtype
from quire.core.config.graphs import GraphConfig
from quire.core.config.load import LoadConfig
from quire.core.config.lora import AdapterOptions
from quire.core.config.model import LogprobsMode, ModelImplementation
from quire.core.config.multimodal import TowerMode
from quire.core.config.observability import ProfilerConfig
from quire.core.config.parallel import EplbConfig, ExpertPlacement
from quire.core.config.pooling import PoolingSpec, SentenceModel
from quire.core.config.quantization import Quantization
from quire.core.config.speculative import Speculation
from quire.core.logging import LoggingConfig
from quire.core.wire.rank import EnginePlace, Layout

SPARE_PROCESS_BYTES = 250 * 2**20
"""What a process takes that has imported everything and has no model."""
DRAFT_ROWS_ALONE = 64
"""Rows of logits of a step with drafts, however few requests may run at once."""

DraftMethod = Literal["mtp", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash"]
"""A kind of layers that draft for a model whose hidden states they read."""


class EncoderSpec(Struct, frozen=True, kw_only=True):
    """Facts about the encoder of a model whose decoder attends to what it has read."""

    vocab_size: int  # of the encoder's tokens
    max_rows: int  # most rows of an input that the decoder attends to: tokens, for a text
    num_channels: int = 0  # of the features that it reads in place of tokens; every input then has `max_rows` rows
    image_size: tuple[int, int] = (0, 0)  # height and width in pixels, where the features are an image

    @property
    def reads_features(self) -> bool:
        """True if inputs are features, such as a sound's spectrogram, and not tokens."""
        return self.num_channels > 0

    @property
    def reads_images(self) -> bool:
        """True if these features are images, and not sounds."""
        return self.image_size != (0, 0)


class ModelSpec(Struct, frozen=True, kw_only=True):
    """Facts about the checkpoint for engine and workers, read once from its folder.

    `hf_config` is the language model's part of config.json, with overrides and the defaults of its class; model files
    read architecture details from it. `config_json` is the file itself, with overrides alone.
    """

    path: str  # local folder
    tokenizer_path: str = ""  # local folder
    name: str  # as the user wrote it
    architecture: str
    hf_config: dict[str, Any]
    config_json: dict[str, Any]
    dtype: Literal["bfloat16", "float16", "float32"]
    vocab_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: list[int]
    implementation: ModelImplementation = "auto"
    trust_remote_code: bool = False  # code that the checkpoint brings may be imported
    model_class: str | None = None  # module:Class that a program or a package registered for the architecture
    sentence: SentenceModel | None = None  # files of sentence-transformers beside the model
    embeds_images: bool = False  # an image is a prompt by itself, whose vector lies among those of texts
    is_encoder: bool = False  # nothing is kept of a sequence from step to step, so that a step computes it whole
    encoder: EncoderSpec | None = (
        None  # the model is a decoder that attends to an encoder's output; other fields are its
    )
    num_token_types: int = 1  # segments that the tokens of a prompt can be of
    drafts_by: DraftMethod | None = None  # these layers of the checkpoint are read, and not a whole model


class SchedulerLimits(Struct, frozen=True, kw_only=True):
    """`SchedulerConfig` and the paging half of `CacheConfig` with every default filled in."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_num_queued_bytes: int | None = None
    max_queue_seconds: int = 0  # 0: no limit
    priority_aging_seconds: float = 0.0  # 0: priorities do not age
    long_prefill_slowdown: float = 0.0  # 0: no limit
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    block_size: int = 16  # tokens of a page, on all of Layout.sequence ranks together
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: HashAlgorithm = "sha256"
    num_lookahead_tokens: int = 0  # places in pages that a running request has past its planned tokens, for drafts
    max_adapters: int = 0  # in one step; 0: the model takes none
    max_adapters_on_host: int = 0

    @property
    def largest_chunk(self) -> int:
        """The most tokens of one request that a step computes."""
        if self.enable_chunked_prefill and self.long_prefill_token_threshold:
            return min(self.long_prefill_token_threshold, self.max_num_batched_tokens)
        return self.max_num_batched_tokens

    @property
    def most_draft_rows(self) -> int:
        """The most rows of logits of a step that checks drafts."""
        return min(self.max_num_batched_tokens, max(self.max_num_seqs, DRAFT_ROWS_ALONE))


class SharedVocabulary(Struct, frozen=True):
    """By the target's token id, ids of a draft model: of what it reads, and of the token with the same text, or -1."""

    input_ids: list[int]
    output_ids: list[int]


class DraftModelConfig(Struct, frozen=True, kw_only=True):
    """A smaller model that proposes the next tokens of requests."""

    spec: ModelSpec
    num_tokens: int  # proposed for a request in a step, at most
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDtype | None = None  # None: as the target's
    vocabulary: SharedVocabulary | None = None  # None: the target's tokens are its first ones


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Everything that an engine process and its workers need, resolved; sent to each as MessagePack."""

    spec: ModelSpec
    limits: SchedulerLimits
    load: LoadConfig
    cache: CacheConfig
    device: Literal["cpu", "cuda"]
    layout: Layout
    place: EnginePlace = EnginePlace()
    served_engines: tuple[int, ...] = (0,)  # numbers of the engines that this server divides requests between
    executor: Literal["uni", "mp"]
    layers_by_stage: list[int] = []  # numbers of layers, one for each of several pipeline stages
    max_model_len: int  # tokens; when `fit_max_model_len`, an upper bound that the memory plan may lower
    fit_max_model_len: bool
    seed: int
    log_stats: bool = True
    aggregate_engine_logging: bool = False
    quantization: Quantization | None = None
    pooling: PoolingSpec | None = None  # None: the model generates
    reads_media: bool = False  # towers for images and sounds are loaded where the model has some
    tower_mode: TowerMode = "weights"
    plans_towers: bool = True  # the memory plan has room for their activations
    speculation: Speculation | None = None  # None: no drafts are made
    draft_model: DraftModelConfig | None = None  # what the method reads
    adapters: AdapterOptions | None = None  # that requests may use; None: none
    expert_placement: ExpertPlacement | None = None  # of whole experts; None: each rank has a part of each
    cp_kv_cache_interleave_size: int = 1  # neighbouring positions that one of Layout.sequence ranks keeps
    eplb: EplbConfig | None = None  # None: experts stay where they are
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: list[str] = []  # module:Class
    logging: LoggingConfig = LoggingConfig()
    is_restart: bool = False  # an engine with these options ran before
    keeps_spare: bool = False  # a spare engine process waits beside each engine
    is_led_from_afar: bool = False  # failures are reported on another host, so they are logged here, too
    enforce_eager: bool = False  # no decode step comes from a recording
    graphs: GraphConfig = GraphConfig()
    flight_recorder: str | None = None  # an absolute folder; None: in memory; "off"
    trace_folder: str | None = None  # where timelines are written; None records none
    torch_profile: ProfilerConfig | None = None  # of torch's profiler, with an absolute folder; None: no such profiles
    allow_insecure_serialization: bool = False  # workers run functions that the program sends
    first_touch_seconds: float = 1.0  # for having the KV cache's memory at hand, beside the first requests; CPUs only

    @property
    def process_name(self) -> str:
        """The engine's name in logs: `engine`, or with others `engine-dp1`."""
        return "engine" if self.layout.data == 1 else f"engine-dp{self.place.data}"

    @property
    def logs_hints(self) -> bool:
        """True for the one engine that logs what is slow on this machine."""
        return not self.is_restart and self.place.local == 0

    @property
    def num_engines_loading(self) -> int:
        """The number of engines that divide the free memory of this host now. A restarted engine is alone: the others
        have left it the memory that is free. Engines that share experts are restarted together."""
        return 1 if self.is_restart and not self.layout.shares_experts else self.place.num_local

    @property
    def spare_bytes(self) -> int:
        """The RAM of this host that spare processes take, of all engines that start now."""
        num_processes = 1 if self.executor == "uni" else 1 + self.layout.num_local
        return SPARE_PROCESS_BYTES * num_processes * self.num_engines_loading if self.keeps_spare else 0

    @property
    def page_slots(self) -> int:
        """Tokens of a page that one rank keeps."""
        return self.limits.block_size // self.layout.sequence

    def layers_of(self, stage: int) -> range:
        """Indices of the layers that a pipeline stage computes."""
        if self.layout.pipeline == 1:
            return range(self.spec.num_layers)
        first = sum(self.layers_by_stage[:stage])
        return range(first, first + self.layers_by_stage[stage])

    def drafts_by(self, method: DraftMethod) -> bool:
        """Returns True if layers of this kind draft for the model, or are the model that this configuration is of."""
        return method in (self.spec.drafts_by, None if self.draft_model is None else self.draft_model.spec.drafts_by)

    def of_draft_model(self) -> "EngineConfig | None":
        """Returns the same configuration for loading the draft model instead of the target; None if there is none."""
        if self.draft_model is None:
            return None
        kind = self.draft_model.kv_cache_dtype or self.cache.kv_cache_dtype
        cache = replace(self.cache, kv_cache_dtype=kind, kv_cache_dtype_skip_layers=[])  # names the target's layers
        return replace(
            self,
            spec=self.draft_model.spec,
            quantization=self.draft_model.quantization,
            cache=cache,
            draft_model=None,
            adapters=None,
            enforce_eager=self.enforce_eager or (self.speculation is not None and self.speculation.enforce_eager),
        )
