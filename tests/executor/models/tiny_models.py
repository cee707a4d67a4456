"""A tiny random checkpoint of any decoder that Transformers has, and what the library computes with it."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 320

SIZES: dict[tuple[str, ...], Any] = {
    ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "dim", "word_embed_proj_dim"): 64,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"): 4,
    ("encoder_layers",): 4,
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"): 4,
    ("num_key_value_heads", "num_kv_heads"): 2,
    ("head_dim", "d_kv", "dim_head"): 16,
    ("intermediate_size", "ffn_hidden_size", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "dff"): 96,
    ("moe_intermediate_size", "shared_expert_intermediate_size"): 48,
    ("shared_intermediate_size", "expert_ffn_hidden_size"): 48,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 4,
    ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"): 2,
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"): 1,
    ("n_group", "topk_group", "num_expert_group"): 1,
    ("first_k_dense_replace", "num_dense_layers"): 1,
    ("vocab_size", "vocab_size_per_layer_input", "n_vocab"): VOCAB_SIZE,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"): 256,
    ("sliding_window", "attention_window", "window_size"): 24,
    ("attention_chunk_size",): 32,
    ("q_lora_rank",): 40,
    ("index_topk",): 20,
    ("kv_lora_rank",): 24,
    ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"): 16,
    ("pad_token_id", "bos_token_id", "decoder_start_token_id"): 0,
    ("eos_token_id",): 2,
    ("is_decoder", "use_cache", "causal"): True,
    ("is_encoder_decoder", "output_router_logits"): False,
    ("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "resid_pdrop"): 0.0,
}  # fmt: skip
"""Values of config.json's fields, where a config has them."""

_LATENT = {"num_key_value_heads": 4, "head_dim": 16}  # every head has keys of its own

SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("longcat_flash", "minicpm3", "dots3_note_text", "sarvam_mla", "youtu"), _LATENT),
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "glm_moe_dsa": {**_LATENT, "indexer_types": ["full", "shared", "full", "shared"]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "initializer_range": 1.0},  # which its scales are divided by
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "kimi_linear": {**_LATENT, "layer_types": ["linear_attention", "full_attention"] * 2},
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"]},
    **{name: {"layer_types": ["sliding_attention", "full_attention"] * 2} for name in ("gemma3_text", "kolibri1")},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "unpadded_vocab_size": VOCAB_SIZE - 10},
    "inkling2_loop_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 3, "num_hidden_layers": 6, "unpadded_vocab_size": VOCAB_SIZE - 10,
        "n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 3,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2, "index_head_dim": 16,
        "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "xlstm": {"qk_dim_factor": 1.0},  # its cache has keys of a multiple of 64 numbers
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 2, "n_mamba_heads": 8,
        "num_key_value_heads": 4, "use_shared_attention_adapter": True, "adapter_rank": 8, "tie_word_embeddings": True,
    },
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "deepseek_v4": {
        "num_key_value_heads": 1, "head_dim": 32, "partial_rotary_factor": 0.5, "o_groups": 2, "o_lora_rank": 24,
        "index_n_heads": 8, "index_head_dim": 16, "index_topk": 4,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": ["sliding_attention", *["heavily_compressed_attention", "compressed_sparse_attention"] * 2][:4],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_lowrank": 16,
        "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "ple_layer_ids": [1, 3], "ngram_vocab_size_base": 50, "heads_per_ngram": 2,
        "eos_token_id": 2, "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 2,
    },
    "reformer": {
        "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16], "attention_head_size": 16,
        "feed_forward_size": 96, "attn_layers": ["local", "lsh"] * 2, "local_attention_probs_dropout_prob": 0.0,
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""By model type: what does not follow from `SIZES`."""

MODEL_TYPES = sorted(
    name
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name in CONFIG_MAPPING and not CONFIG_MAPPING[name].sub_configs
)
"""All decoders of text; models with parts for images or sounds have types of their own for their decoders."""


def tiny_config(model_type: str) -> PretrainedConfig:
    """A config of few small layers."""
    kind = CONFIG_MAPPING[model_type]
    default = kind().to_dict()
    parameters = inspect.signature(kind.__init__).parameters
    names = set(default) | set(parameters)
    values = {name: value for keys, value in SIZES.items() for name in keys if name in names}
    values = {name: value for name, value in values.items() if default.get(name) is not None or name in ("is_decoder",)}
    return kind(**{**values, **SPECIAL.get(model_type, {})})


def write_checkpoint(folder: Path, model_type: str, seed: int = 0, **settings: Any) -> str:
    """Writes a checkpoint of random weights, with `settings` changed in its config; returns its architecture."""
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    for name, value in settings.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return type(model).__name__


class Reference:
    """Transformers' own model of a checkpoint, in float32."""

    def __init__(self, folder: Path) -> None:
        kind: type[PreTrainedModel] = AutoModelForCausalLM  # type: ignore[assignment]
        self._model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> Tensor:
        """Log-probabilities after each token: [num_tokens, vocab]."""
        return self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].log_softmax(-1)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """The library's greedy search, with its cache: tokens, and log-probabilities [num_tokens, vocab] of each."""
        made = self._model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        return made.sequences[0, len(prompt) :].tolist(), torch.cat(made.logits).log_softmax(-1)
