"""The resolved options by vLLM's names, for programs that read them: `llm.llm_engine.vllm_config.model_config`.

Quire itself reads `EngineConfig`. Options that only vLLM has are absent here, and the error points to Quire's.
"""

import functools
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import Struct

from quire.core.config.resolved import EngineConfig
from quire.core.wire.protocol import EngineReady
from quire.frontend.checkpoint.served_model import ServedModel


class _OptionGroup(Struct, frozen=True, kw_only=True, dict=True):
    """A group of options."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{type(self).__name__} has no {name!r}: Quire's resolved options are in `config`.")


class ParallelConfig(_OptionGroup, frozen=True, kw_only=True):
    """The number of workers that share a model."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    world_size: int  # workers of one engine
    world_size_across_dp: int


class SchedulerConfig(_OptionGroup, frozen=True, kw_only=True):
    """The scheduler's limits of requests and tokens, and its policy."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str
    enable_chunked_prefill: bool
    async_scheduling: bool
    long_prefill_token_threshold: int


class CacheConfig(_OptionGroup, frozen=True, kw_only=True):
    """The KV cache."""

    block_size: int
    num_gpu_blocks: int | None  # None until the engine has started
    cache_dtype: str
    enable_prefix_caching: bool
    prefix_caching_hash_algo: str
    gpu_memory_utilization: float


class ModelConfig(_OptionGroup, frozen=True, kw_only=True):
    """The model and the options of its execution.

    Attributes:
        dtype: of the computation, as torch's object.
        hf_config: config.json with `hf_overrides`, as an object of Transformers' class for it, or of the base class if
            Transformers does not know the model.
    """

    model: str
    tokenizer: str
    served_model_name: str
    max_model_len: int
    max_logprobs: int
    seed: int
    quantization: str | None
    trust_remote_code: bool
    logits_processors: list[str]
    enable_prompt_embeds: bool
    skip_tokenizer_init: bool
    runner_type: str
    is_multimodal_model: bool = False
    is_encoder_decoder: bool = False
    config: EngineConfig
    default_sampling: dict[str, Any]

    @functools.cached_property
    def hf_config(self) -> Any:
        return _transformers_config({**self.config.spec.config_json, "_name_or_path": self.model})

    @property
    def hf_text_config(self) -> Any:
        """The part of `hf_config` that describes the language model."""
        return self.hf_config.get_text_config(decoder=True)

    @functools.cached_property
    def dtype(self) -> Any:
        return _transformers_config({"dtype": self.config.spec.dtype}).dtype

    @property
    def architectures(self) -> list[str]:
        """The classes of the model, as in config.json."""
        return [self.config.spec.architecture]

    @property
    def architecture(self) -> str:
        """The class of the model, as in config.json."""
        return self.config.spec.architecture

    def get_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.config.spec.vocab_size

    def get_hidden_size(self) -> int:
        """Elements of a hidden state."""
        return self.config.spec.hidden_size

    def get_head_size(self) -> int:
        """Elements of an attention head."""
        return self.config.spec.head_dim

    def get_sliding_window(self) -> int | None:
        """Tokens that windowed layers see, if config.json has such a window."""
        window: int | None = self.config.spec.hf_config.get("sliding_window")
        return window

    def get_total_num_kv_heads(self) -> int:
        """KV heads of a layer, on all workers together."""
        return self.config.spec.num_kv_heads

    def get_num_kv_heads(self, parallel_config: ParallelConfig) -> int:
        """KV heads of a layer on one worker."""
        return max(1, self.config.spec.num_kv_heads // parallel_config.tensor_parallel_size)

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int:
        """Query heads of a layer on one worker."""
        return self.config.spec.num_attention_heads // parallel_config.tensor_parallel_size

    def get_total_num_hidden_layers(self) -> int:
        """Layers of all stages."""
        return self.config.spec.num_layers

    def get_num_layers(self, parallel_config: ParallelConfig) -> int:
        """Layers of the first pipeline stage."""
        return len(self.config.layers_of(0))

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """The checkpoint's defaults for sampling parameters."""
        return dict(self.default_sampling)


class VllmConfig(_OptionGroup, frozen=True, kw_only=True):
    """All groups of options."""

    model_config: ModelConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    lora_config: None = None
    speculative_config: None = None
    kv_transfer_config: None = None


def vllm_config(
    config: EngineConfig, model: ServedModel, ready: EngineReady | None, *, max_model_len: int, tokenizer: str | None
) -> VllmConfig:
    """An engine's options.

    Args:
        ready: the engine's report of its start; None before it has started.
        tokenizer: its folder; None without one.
    """
    limits, cache, layout = config.limits, config.cache, config.layout
    return VllmConfig(
        model_config=ModelConfig(
            model=config.spec.name,
            tokenizer=tokenizer or config.spec.name,
            served_model_name=model.name,
            max_model_len=max_model_len,
            max_logprobs=model.max_logprobs,
            seed=config.seed,
            quantization=_quantization(config),
            trust_remote_code=config.spec.trust_remote_code,
            logits_processors=config.logits_processors,
            enable_prompt_embeds=model.takes_embeds,
            skip_tokenizer_init=tokenizer is None,
            runner_type="generate" if config.pooling is None else "pooling",
            config=config,
            default_sampling=model.default_sampling,
        ),
        cache_config=CacheConfig(
            block_size=limits.block_size if ready is None else ready.block_size,
            num_gpu_blocks=None if ready is None else ready.num_pages,
            cache_dtype=cache.kv_cache_dtype,
            enable_prefix_caching=limits.enable_prefix_caching if ready is None else ready.caches_prefixes,
            prefix_caching_hash_algo=limits.prefix_caching_hash_algo,
            gpu_memory_utilization=cache.memory_share,
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=layout.tensor,
            pipeline_parallel_size=layout.pipeline,
            data_parallel_size=layout.data,
            enable_expert_parallel=layout.expert > 1,
            world_size=layout.num_workers,
            world_size_across_dp=layout.num_workers * layout.data,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=limits.policy,
            enable_chunked_prefill=limits.enable_chunked_prefill,
            async_scheduling=limits.async_scheduling,
            long_prefill_token_threshold=limits.long_prefill_token_threshold,
        ),
    )


def _quantization(config: EngineConfig) -> str | None:
    """The weights' quantization format: the one that an option names, else the checkpoint's."""
    asked = config.quantization
    if asked is not None:
        return asked if isinstance(asked, str) else "online"
    stored = config.spec.hf_config.get("quantization_config")
    return stored.get("quant_method") if isinstance(stored, dict) else None


def _transformers_config(fields: dict[str, Any]) -> Any:
    """Fields of config.json as Transformers' object, with the defaults of its class."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig  # imported here: it takes seconds, and few programs ask

    known = fields.get("model_type") in CONFIG_MAPPING
    return (CONFIG_MAPPING[fields["model_type"]] if known else PreTrainedConfig).from_dict(dict(fields))
