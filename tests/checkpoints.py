"""Tiny random checkpoints in the Hugging Face layout: weights, config, tokenizer, chat template.

The weights are scaled so that greedy outputs vary instead of repeating one token. Norms and biases are random, too, so
that a model without one of them gives other tokens.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Ernie4_5_MoeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OpenAIGPTConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
    YoutuConfig,
)
from transformers.core_model_loading import revert_weight_conversion

Family = Literal[
    *("falcon", "gpt2", "gpt_neox", "openai_gpt", "opt", "starcoder2"),
    *("cohere", "cohere2", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "glm", "glm4"),
    *("glm4_moe", "granite", "llama", "llama4", "mistral", "phimoe"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "mistral4", "youtu"),
    *("mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("ernie4_5_moe", "gpt_oss", "granite_moe", "minimax_m2", "olmoe"),
]

FAMILIES: dict[Family, tuple[type[PretrainedConfig], str]] = {
    "ernie4_5_moe": (Ernie4_5_MoeConfig, "Ernie4_5_MoeForCausalLM"),
    "falcon": (FalconConfig, "FalconForCausalLM"),
    "gpt2": (GPT2Config, "GPT2LMHeadModel"),
    "gpt_neox": (GPTNeoXConfig, "GPTNeoXForCausalLM"),
    "openai_gpt": (OpenAIGPTConfig, "OpenAIGPTLMHeadModel"),
    "opt": (OPTConfig, "OPTForCausalLM"),
    "cohere": (CohereConfig, "CohereForCausalLM"),
    "cohere2": (Cohere2Config, "Cohere2ForCausalLM"),
    "deepseek_v2": (DeepseekV2Config, "DeepseekV2ForCausalLM"),
    "deepseek_v3": (DeepseekV3Config, "DeepseekV3ForCausalLM"),
    "deepseek_v32": (DeepseekV32Config, "DeepseekV32ForCausalLM"),
    "gemma": (GemmaConfig, "GemmaForCausalLM"),
    "gemma2": (Gemma2Config, "Gemma2ForCausalLM"),
    "gemma3": (Gemma3TextConfig, "Gemma3ForCausalLM"),
    "gemma3n": (Gemma3nTextConfig, "Gemma3nForCausalLM"),
    "gemma4": (Gemma4TextConfig, "Gemma4ForCausalLM"),
    "glm": (GlmConfig, "GlmForCausalLM"),
    "glm4": (Glm4Config, "Glm4ForCausalLM"),
    "glm4_moe": (Glm4MoeConfig, "Glm4MoeForCausalLM"),
    "glm4_moe_lite": (Glm4MoeLiteConfig, "Glm4MoeLiteForCausalLM"),
    "glm_moe_dsa": (GlmMoeDsaConfig, "GlmMoeDsaForCausalLM"),
    "gpt_oss": (GptOssConfig, "GptOssForCausalLM"),
    "granite": (GraniteConfig, "GraniteForCausalLM"),
    "granite_moe": (GraniteMoeConfig, "GraniteMoeForCausalLM"),
    "llama": (LlamaConfig, "LlamaForCausalLM"),
    "llama4": (Llama4TextConfig, "Llama4ForCausalLM"),
    "minicpm3": (MiniCPM3Config, "MiniCPM3ForCausalLM"),
    "minimax_m2": (MiniMaxM2Config, "MiniMaxM2ForCausalLM"),
    "mistral": (MistralConfig, "MistralForCausalLM"),
    "mistral4": (Mistral4Config, "Mistral4ForCausalLM"),
    "mixtral": (MixtralConfig, "MixtralForCausalLM"),
    "olmo2": (Olmo2Config, "Olmo2ForCausalLM"),
    "olmo3": (Olmo3Config, "Olmo3ForCausalLM"),
    "olmoe": (OlmoeConfig, "OlmoeForCausalLM"),
    "phi3": (Phi3Config, "Phi3ForCausalLM"),
    "phimoe": (PhimoeConfig, "PhimoeForCausalLM"),
    "qwen2": (Qwen2Config, "Qwen2ForCausalLM"),
    "qwen2_moe": (Qwen2MoeConfig, "Qwen2MoeForCausalLM"),
    "qwen3": (Qwen3Config, "Qwen3ForCausalLM"),
    "qwen3_moe": (Qwen3MoeConfig, "Qwen3MoeForCausalLM"),
    "starcoder2": (Starcoder2Config, "Starcoder2ForCausalLM"),
    "youtu": (YoutuConfig, "YoutuForCausalLM"),
}
# The library has this model only within one that reads images, and `register` passes over classes of its own.
AutoModelForCausalLM._model_mapping._extra_content[Mistral4Config] = Mistral4ForCausalLM

_SPARSE_SIZES = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "index_n_heads": 16, "index_head_dim": 20, "index_topk": 11,
}  # fmt: skip

EXPERT_SIZES: dict[Family, dict[str, Any]] = {
    "deepseek_v2": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2,
    },
    "deepseek_v32": _SPARSE_SIZES,
    "glm_moe_dsa": _SPARSE_SIZES,
    "mistral4": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "glm4_moe_lite": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 20, "moe_num_shared_experts": 2,
    },
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
    "granite_moe": {"num_local_experts": 7, "num_experts_per_tok": 3},
    "llama4": {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size_mlp": 72, "head_dim": 16},
    "phimoe": {"num_local_experts": 6, "router_jitter_noise": 0.2},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 44,
    },
    "qwen3_moe": {"num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 36},
}  # fmt: skip
"""Of mixtures of experts."""

LATENT_SIZES = {
    "q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 18,
}  # fmt: skip
"""Of multi-head latent attention; none is a multiple of another."""


_ALL_HEADS = ("falcon", "gpt2", "gpt_neox", "openai_gpt", "opt")
"""Families whose queries share no keys, or that say it in a field of their own."""

VOCAB_SIZE = 320
"""Default vocabulary: 3 special tokens, the 256 bytes and a few merges."""

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_TOKEN, EOS_TOKEN_ID = "<|im_end|>", 2

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog and runs to the river in the evening.",
    "A quire is a gathering of pages; the heart of the engine is a pool of pages that many requests share.",
    "Hello, how are you today? I am fine, thank you. What is the capital of France? It is Paris.",
    "system user assistant\nYou are a helpful assistant.\n",
    "Naïve café, Grüße aus Köln, 你好，世界, привет, мир 🙂",
]


def make_checkpoint(
    folder: Path,
    family: Family = "llama",
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    tie: bool = False,
    sliding_window: int | None = None,
    head_dim: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    max_position_embeddings: int = 2048,
    rope: dict[str, Any] | None = None,
    pad_token_id: int | None = 0,
    seed: int = 0,
    safetensors_shards: int = 1,
    **config: Any,
) -> Path:
    """Writes one checkpoint and returns its folder.

    `rope` is transformers' `rope_parameters`; `config` goes to the family's config class (`attention_bias=True`).
    `sliding_window` is applied as the family says: by every Mistral layer; by Qwen layers from `max_window_layers` on
    (0 unless given); by five of six Gemma layers.
    """
    kind, architecture = FAMILIES[family]
    if sliding_window is not None and family in ("qwen2", "qwen3"):
        config = {"use_sliding_window": True, "max_window_layers": 0, **config}
    if family == "mistral" or sliding_window is not None:
        config["sliding_window"] = sliding_window
    config = {**EXPERT_SIZES.get(family, {}), **config}
    if family == "gemma3n":  # the last of more than four layers share the keys and values of those before them
        types = ["sliding_attention", "full_attention"] * num_hidden_layers
        config = {
            "layer_types": types[:num_hidden_layers],
            "num_kv_shared_layers": max(0, num_hidden_layers - 4),
            **config,
        }
    if family in ("gemma3n", "gemma4"):  # whose tables for each layer would have a gigabyte
        config = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": vocab_size, **config}
    if hasattr(kind, "kv_lora_rank"):
        config = {**LATENT_SIZES, **config}
        num_key_value_heads = num_attention_heads
    if head_dim is not None:
        config["head_dim"] = head_dim
    elif family in ("gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "glm", "glm4", "qwen3"):
        config["head_dim"] = hidden_size // num_attention_heads
    if rope is not None:
        config["rope_parameters"] = rope
    hf_config = kind(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        **({} if family in _ALL_HEADS else {"num_key_value_heads": num_key_value_heads}),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=pad_token_id,
        architectures=[architecture],
        dtype=dtype,
        **config,
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _save_weights(folder, hf_config, getattr(torch, dtype), seed, safetensors_shards)
    hf_config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0}))
    make_tokenizer(min(vocab_size, VOCAB_SIZE), max_position_embeddings).save_pretrained(folder)
    return folder


def make_tokenizer(vocab_size: int = VOCAB_SIZE, model_max_length: int = 2048) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template; at least 259 tokens, every text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def _save_weights(folder: Path, hf_config: PretrainedConfig, dtype: torch.dtype, seed: int, num_shards: int) -> None:
    """Random weights in `num_shards` safetensors files, with an index when there are several."""
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    is_gemma = hf_config.model_type.startswith("gemma")  # it multiplies embeddings
    is_offset = hf_config.model_type in ("gemma", "gemma2", "gemma3_text")  # norms are stored less 1
    ends_in_norms = hf_config.model_type == "openai-gpt"  # whose biases would outweigh all tokens
    stored = model.state_dict()
    named = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in stored)]
    for name, parameter in named:  # a tied parameter once, under the embedding's name
        noise = torch.randn(parameter.shape, generator=generator)
        if re.search(r"((norm|ln_\w+|layernorm_\d)\.weight|scalar|scale)$", name):
            value = 0.2 * noise + (0 if is_offset else 1)
        elif parameter.dim() == 1:
            value = (0.05 if ends_in_norms else 0.5) * noise
        elif re.search(r"embed|wte|wpe", name):
            value = (0.05 if is_gemma else 0.3) * noise
        else:
            value = noise * (2.0 / parameter.shape[1 if parameter.dim() == 2 else -1] ** 0.5)
        tensors[name] = value.to(dtype)
    tensors = revert_weight_conversion(model, tensors)  # to the names and shapes of files
    names = list(tensors)
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
