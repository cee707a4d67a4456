"""Options: the checkpoint and how to read it."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from quire.core.config.pooling import PoolerConfig
from quire.core.config.quantization import QuantizationConfig, QuantizationName

ModelImplementation = Literal["auto", "quire", "transformers"]
TokenizerMode = Literal[
    "auto", "hf", "slow", "mistral", "cohere", "deepseek_v32", "deepseek_v4", "deepseek_v41", "inkling", "kimi_k3"
]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The checkpoint and how to read it."""

    model: Annotated[
        str | None,
        Meta(description="Folder, hub id or GGUF file of the checkpoint; the embedded demo model when left out."),
    ] = None
    tokenizer: Annotated[str | None, Meta(description="Folder or hub id of the tokenizer, if not the model's own.")] = (
        None
    )
    tokenizer_mode: Annotated[
        TokenizerMode,
        Meta(
            description="auto and hf read tokenizer.json, or else convert SentencePiece, tiktoken, tekken.json or "
            "vocabulary files; slow converts those, and mistral tekken.json, even where tokenizer.json is there. "
            "cohere, deepseek_v32, deepseek_v4, deepseek_v41, inkling and kimi_k3 write messages as the models' makers "
            "describe; auto chooses these, without cohere, for checkpoints of the models without a chat template.",
            extra={
                "refused": {
                    "alpamayo2_super": "It adds tokens to a model that reads images, which is not served; for a model "
                    "of text, take auto.",
                    "kimi_audio": "It reads tiktoken.model for a model of audio, which is not served; for a model of "
                    "text, take auto, which converts tiktoken.model, and --chat-template.",
                    "terratorch": "It stands for the tokenizer of models that read images alone, which are not served; "
                    "for a model of text, take auto.",
                },
            },
        ),
    ] = "auto"
    skip_tokenizer_init: Annotated[bool, Meta(description="Run on token ids alone; text in or out is refused.")] = False
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of the model on the hub.")] = None
    tokenizer_revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of the tokenizer on the hub.")
    ] = None
    hf_token: Annotated[
        str | bool | None,
        Meta(
            description="Token for gated repositories on the hub; without a value, the one that `hf auth login` saved, "
            "which then must be there.",
            extra={"value_optional": True},
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None, Meta(description="Names that clients may use for the model; the first one is reported.")
    ] = None
    config_format: Annotated[
        Literal["auto", "hf", "mistral"],
        Meta(
            description="File of the model's sizes: hf is config.json, mistral is params.json of Mistral's own "
            "releases; auto takes config.json if there is one."
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "float", "half"],
        Meta(description="Type of weights and activations; auto takes the checkpoint's own."),
    ] = "auto"
    quantization: Annotated[
        QuantizationName | None,
        Meta(
            description="Make weights of linear layers smaller as they are loaded: int8, fp8 (fp8_per_block, "
            "fp8_per_tensor), mxfp8, int4, mxfp4, or bitsandbytes (NF4). Quantized checkpoints are read without it; "
            "their format's name is taken.",
            extra={
                "aliases": ["-q"],
                "otherwise": "docs/quantization.md lists the formats that are read, and those that are made at load.",
                "refused": {
                    "nvfp4_per_token": "It rounds activations to 4 bits, which no kernel here does: take mxfp4.",
                    "fp_quant": "It turns weights by a transform, which is not read: take mxfp4.",
                    "humming": "It names kernels of GPUs; leave the option out, and the checkpoint's format is read.",
                },
            },
        ),
    ] = None
    quantization_config: Annotated[
        QuantizationConfig | None,
        Meta(
            description="Make weights smaller by kind of layer: linear and moe (routed experts) are values of "
            '--quantization or {"weight": null}, ignore lists layers that stay as they are, by names, re:... or *; '
            "targets instead gives names and patterns a value each.",
            extra={"parse": "json"},
        ),
    ] = None
    model_impl: Annotated[
        Literal["auto", "quire", "vllm", "transformers"],
        Meta(
            description="Who implements the architecture: quire (vllm means the same), the class of the Transformers "
            "library with Quire's parts, or auto: quire where it has the architecture with all settings."
        ),
    ] = "auto"
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Meta(
            description="The model's output: generate is text, pooling is vectors, classes or scores; auto takes what "
            "the checkpoint's class and its files of sentence-transformers say.",
            extra={"refused": {"draft": "A draft model is named by the target's server."}},
        ),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify"],
        Meta(
            description="What a model with --runner pooling makes of its hidden states: embed (vectors), classify "
            "(classes or scores), none (what its class says); auto chooses.",
            extra={
                "refused": {
                    "reward": "Take classify, whose task token_classify gives a reward of each token.",
                    "score": "Take classify.",
                },
            },
        ),
    ] = "auto"
    pooler_config: Annotated[
        PoolerConfig | None,
        Meta(
            description="How vectors are made: pooling_type (or seq_pooling_type CLS, LAST, MEAN and tok_pooling_type "
            "ALL, STEP), use_activation, dimensions, task, enable_chunked_processing and max_embed_len, logit_mean and "
            "logit_sigma, step_tag_id and returned_token_ids. What is left out is as the checkpoint says.",
            extra={"parse": "json"},
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Meta(
            description="Import the Python files that the checkpoint names in auto_map of its config.json, or of its "
            "tokenizer_config.json where there is no tokenizer.json."
        ),
    ] = False
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
        int, Meta(ge=-1, description="Most logprobs a request may ask for; -1 allows the whole vocabulary.")
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
    io_processor_plugin: Annotated[
        str | None,
        Meta(
            description="Plugin of an installed package, by the name of its entry point: it makes prompts of the field "
            "data of /pooling, and the answer of their outputs. config.json may name one, too."
        ),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any],
        Meta(description="Values that replace those of the checkpoint's config.json.", extra={"parse": "json"}),
    ] = {}
