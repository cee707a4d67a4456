"""GGUF files of architectures whose tensors llama.cpp's converter rearranges: each is the checkpoint's model."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.readers import Shard
from quire.frontend.checkpoint.gguf import make_folder, parts_of
from tests.executor.models.test_deepseek_moe import make_deepseek_moe
from tests.executor.models.test_hybrid_models import DELTA, MAMBA, NEMOTRON, VARIANTS, save_hybrid
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank
from tests.gguf_classes import BY_CLASSES, TYPES, WINDOWS
from tests.gguf_conventions import stored_tensors, stored_values, write_gguf

TOKENS = [5, 9, 200, 17, 33, 4, 250, 61, 7, 8, 90, 12]

SIZES = {
    "block_count": 4, "context_length": 2048, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip
"""Metadata that most files have; None below: not this one."""
LATENT = {
    "block_count": 2, "attention.head_count_kv": 1, "attention.key_length": 36, "attention.value_length": 24,
    "attention.kv_lora_rank": 24, "attention.key_length_mla": 32, "attention.value_length_mla": 18,
    "rope.dimension_count": 12, "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 3,
    "expert_feed_forward_length": 20,
}  # fmt: skip
SIGMOID_EXPERTS = {
    "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 20, "expert_shared_count": 1,
    "leading_dense_block_count": 1, "expert_weights_norm": True, "expert_weights_scale": 2.5,
    "expert_gating_func": 2, "attention.key_length": 16, "attention.value_length": 16, "block_count": 2,
}  # fmt: skip
MISTRAL = {
    **LATENT, "attention.q_lora_rank": 40, "expert_shared_count": 1, "expert_weights_scale": 1.0,
    "expert_weights_norm": True, "expert_group_count": 1, "expert_group_used_count": 1,
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 4,
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_log_multiplier": 0.1,
}  # fmt: skip
MISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA4 = {
    "rope.freq_base": 1e6, "rope.freq_base_swa": 10000.0, "attention.sliding_window": 4, "attention.key_length": 32,
    "attention.value_length": 32, "attention.key_length_swa": 16, "attention.value_length_swa": 16,
}  # fmt: skip
SSM = {
    "ssm.conv_kernel": 4, "ssm.state_size": 20, "ssm.group_count": 2, "ssm.inner_size": 128, "ssm.time_step_rank": 8,
}  # fmt: skip
HYBRID = {**SSM, "ssm.conv_kernel": 3, "context_length": 2**20, "attention.scale": 0.2}
NEMOTRON_H = {
    **SSM, "attention.key_length": 24, "attention.value_length": 24, "rope.dimension_count": 16,
    "attention.layer_norm_epsilon": 1e-5, "expert_count": 6, "expert_used_count": 2,
    "attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 28, 0, 28],
}  # fmt: skip
NO_ATTENTION = {
    "attention.head_count": 0, "attention.head_count_kv": None, "feed_forward_length": 0, "context_length": 2**20,
    "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": None,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        "gpt2",
        "gpt2",
        {"tie": True},
        {
            "block_count": 2, "attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 256,
            "attention.head_count_kv": None,
        },
    ),
    "falcon-7b": (
        "falcon",
        "falcon",
        {"tie": True, "num_kv_heads": 1},
        {"attention.head_count_kv": 1, "attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 256,
         "block_count": 2},
    ),
    "falcon-40b": (
        "falcon",
        "falcon",
        {"tie": True, "new_decoder_architecture": True, "num_kv_heads": 2},
        {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 256, "block_count": 2},
    ),
    "gpt-neox": (
        "gpt_neox",
        "gptneox",
        {},
        {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None, "rope.freq_base": None,
         "attention.head_count_kv": None, "rope.dimension_count": 4, "use_parallel_residual": True,
         "block_count": 2},
    ),
    "glm": (
        "glm",
        "chatglm",
        {"attention_bias": True},
        {"block_count": 2, "rope.dimension_count": 8, "attention.layer_norm_rms_epsilon": 1.5625e-7},
    ),
    "qwen2-vl": ("qwen2", "qwen2vl", {}, {"block_count": 2, "rope.dimension_sections": [3, 3, 2, 0]}),
    "qwen3-vl": (
        "qwen3",
        "qwen3vl",
        {},
        {"block_count": 2, "rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3,
         "attention.key_length": 16, "attention.value_length": 16},
    ),
    "qwen3-vl-moe": (
        "qwen3_moe",
        "qwen3vlmoe",
        {"norm_topk_prob": True, "head_dim": 16},
        {"block_count": 2, "rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3, "expert_count": 9,
         "expert_used_count": 4, "expert_feed_forward_length": 36, "attention.key_length": 16,
         "attention.value_length": 16},
    ),
    "dots1": (
        "glm4_moe",
        "dots1",
        {"use_qk_norm": True, "head_dim": 16, "routed_scaling_factor": 2.5,
         "rope": {**ROPE, "partial_rotary_factor": 1.0}},
        {**SIGMOID_EXPERTS, "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "bailing-moe-2": (
        "glm4_moe",
        "bailingmoe2",
        {"use_qk_norm": True, "head_dim": 16, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2,
         "rope": {**ROPE, "partial_rotary_factor": 0.5}},
        {**SIGMOID_EXPERTS, "expert_group_count": 4, "expert_group_used_count": 2, "rope.dimension_count": 8,
         "attention.layer_norm_rms_epsilon": 1e-5, "expert_shared_feed_forward_length": 20},
    ),
    "minicpm3": (
        "minicpm3",
        "minicpm3",
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "rope": {**ROPE, "rope_type": "longrope",
         "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
         "original_max_position_embeddings": 2048}},
        {"block_count": 2, "attention.head_count_kv": 4, "attention.q_lora_rank": 40, "attention.kv_lora_rank": 24,
         "attention.key_length": 32, "rope.dimension_count": 12},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        "deepseek2",
        {},
        {**LATENT, "attention.q_lora_rank": 40, "expert_shared_count": 2, "expert_weights_scale": 1.0},
    ),
    "deepseek-v2-lite": ("deepseek_v2", "deepseek2", {"q_lora_rank": None}, {**LATENT, "expert_shared_count": 2}),
    "deepseek-v3": (
        "deepseek_v3",
        "deepseek2",
        {
            "rope": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
                "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            },
            "routed_scaling_factor": 2.5,
        },
        {
            **LATENT, "attention.q_lora_rank": 40, "expert_shared_count": 1, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "expert_group_count": 4, "expert_group_used_count": 2,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512,
            "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
            "rope.scaling.yarn_log_multiplier": 0.1, "expert_gating_func": 2,
        },
    ),
    "mistral-large-3": (
        "deepseek_v3",
        "deepseek2",
        {"rope": MISTRAL_ROPE, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        {**MISTRAL, "expert_gating_func": 2, "attention.temperature_scale": 0.3},
    ),
    "mistral-4": (
        "mistral4",
        "mistral4",
        {"rope": {**MISTRAL_ROPE, "llama_4_scaling_beta": 0.1}, "first_k_dense_replace": 1},
        {**MISTRAL, "expert_feed_forward_length": 32},
    ),
    "glm-5": (
        "glm_moe_dsa",
        "glm-dsa",
        {"indexer_types": ["full", "shared"], "routed_scaling_factor": 2.5},
        {
            **LATENT, "attention.q_lora_rank": 40, "expert_shared_count": 1, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "expert_gating_func": 2, "attention.indexer.head_count": 16,
            "attention.indexer.key_length": 20, "attention.indexer.top_k": 11, "attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
    "llama4": (
        "llama4",
        "llama4",
        {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "rope": {"rope_type": "default", "rope_theta": 1e4}},
        {
            "feed_forward_length": 72, "expert_count": 5, "expert_used_count": 1, "attention.key_length": 16,
            "attention.layer_norm_rms_epsilon": 1e-5, "interleave_moe_layer_step": 2, "expert_feed_forward_length": 96,
        },
    ),
    "gemma3n": (
        "gemma3n",
        "gemma3n",
        {
            "tie": True, "num_hidden_layers": 6, "sliding_window": 4, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 320, "laurel_rank": 8,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        },
        {
            "block_count": 6, "feed_forward_length": [96] * 6, "rope.freq_base": 1e6, "rope.freq_base_swa": 10000.0,
            "attention.key_length": 16, "attention.sliding_window": 4, "final_logit_softcapping": 30.0,
            "embedding_length_per_layer_input": 16, "attention.shared_kv_layers": 2,
            "attention.sliding_window_pattern": [True, False] * 3,
            "activation_sparsity_scale": [1.6448535919189453, 1.6448535919189453, *[float("-inf")] * 4],
        },
    ),
    "gemma4": (
        "gemma4",
        "gemma4",
        {
            "tie": True, "num_hidden_layers": 6, "sliding_window": 4, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 320, "global_head_dim": 32, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True, "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
        {
            **GEMMA4, "block_count": 6, "feed_forward_length": [96] * 4 + [192] * 2, "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 16, "attention.sliding_window_pattern": [True, False] * 3,
        },
    ),
    "gemma4-experts": (
        "gemma4",
        "gemma4",
        {
            "tie": True, "num_hidden_layers": 4, "sliding_window": 4, "hidden_size_per_layer_input": 0,
            "global_head_dim": 32, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "layer_types": TYPES, "enable_moe_block": True, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 32,
        },
        {
            **GEMMA4, "attention.head_count_kv": [2, 1, 2, 1], "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0, "attention.sliding_window_pattern": WINDOWS, "expert_count": 4,
            "expert_used_count": 2, "expert_feed_forward_length": 32,
        },
    ),
}  # fmt: skip
"""(family of checkpoints, llama.cpp's architecture, the checkpoint's options, what the converter writes)."""

GGUF_DELTA = {
    "attention.key_length": 24, "attention.value_length": 24, "rope.dimension_count": 6, "ssm.conv_kernel": 4,
    "ssm.state_size": 12, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 120,
}  # fmt: skip
HYBRIDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-next": (
        "qwen3-next",
        "qwen3next",
        {**DELTA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 24},
        {**GGUF_DELTA, "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 40},
    ),
    "qwen3.5": ("qwen3.5", "qwen35", {**DELTA, "linear_num_value_heads": 2}, {**GGUF_DELTA, "ssm.time_step_rank": 2,
                "ssm.inner_size": 40}),
    "qwen3.5-value-heads": ("qwen3.5", "qwen35", {**DELTA, "linear_value_head_dim": 16}, {**GGUF_DELTA,
                            "ssm.inner_size": 96}),
    "qwen3.5-moe": (
        "qwen3.5-moe",
        "qwen35moe",
        VARIANTS["qwen3.5-moe"][2],
        {**GGUF_DELTA, "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 40},
    ),
    "granite-hybrid": (
        "granite-hybrid",
        "granitehybrid",
        {**VARIANTS["granite-hybrid"][2], "position_embedding_type": None},
        {
            **HYBRID, "attention.head_count_kv": [0, 2, 0, 2], "expert_count": 6, "expert_used_count": 2,
            "embedding_scale": 1.5, "residual_scale": 0.7, "logit_scale": 1.2,
        },
    ),
    "granite-hybrid-dense": (
        "granite-hybrid",
        "granitehybrid",
        {**MAMBA, "layer_types": ["full_attention", "linear_attention"] * 2, "num_local_experts": 0,
         "shared_intermediate_size": 96, "attention_multiplier": 0.2, "position_embedding_type": "rope"},
        {**HYBRID, "attention.head_count_kv": [2, 0, 2, 0], "rope.scaling.finetuned": True, "expert_count": 0},
    ),
    "nemotron-h": (
        "nemotron-h",
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "time_step_min": 0.001},
        {**NEMOTRON_H, "expert_count": 0, "feed_forward_length": [0, 96, 0, 96]},
    ),
    "lfm2-moe": (
        "lfm2-moe",
        "lfm2moe",
        {**VARIANTS["lfm2-moe"][2], "routed_scaling_factor": 1.0, "tie_word_embeddings": True},
        {
            "attention.head_count_kv": [0, 2, 0, 0], "shortconv.l_cache": 3, "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 40, "leading_dense_block_count": 1,
            "expert_gating_func": 2, "rope.freq_base": 1e6,
        },
    ),
    "kimi-linear": (
        "kimi-linear",
        "kimi-linear",
        {
            **VARIANTS["kimi-linear"][2], "moe_renormalize": True, "routed_scaling_factor": 2.5,
            "q_lora_rank": 20,
        },
        {
            "attention.head_count_kv": [0, 1, 0, 0], "ssm.conv_kernel": 3, "kda.head_dim": 16,
            "attention.q_lora_rank": 20, "attention.kv_lora_rank": 24, "rope.dimension_count": 8,
            "attention.key_length": 32, "attention.key_length_mla": 20, "attention.value_length_mla": 20,
            "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 28, "expert_shared_count": 1,
            "leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_gating_func": 2,
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
    "mamba": (
        "mamba",
        "mamba",
        {**VARIANTS["mamba"][2], "use_bias": False, "use_conv_bias": True, "intermediate_size": 128},
        {**NO_ATTENTION, "ssm.state_size": 16, "ssm.time_step_rank": 5, "ssm.inner_size": 128, "ssm.conv_kernel": 4},
    ),
    "falcon-mamba": (
        "falcon-mamba",
        "mamba",
        {**VARIANTS["falcon-mamba"][2], "intermediate_size": 128},
        {
            **NO_ATTENTION, "ssm.state_size": 12, "ssm.time_step_rank": 7, "ssm.inner_size": 128, "ssm.conv_kernel": 4,
            "ssm.dt_b_c_rms": True,
        },
    ),
    "mamba2": (
        "mamba2",
        "mamba2",
        VARIANTS["mamba2"][2],
        {**NO_ATTENTION, **SSM, "ssm.state_size": 12},
    ),
    "falcon-h1": (
        "falcon-h1",
        "falcon-h1",
        {**VARIANTS["falcon-h1"][2], "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        {**SSM, "ssm.conv_kernel": 3, "block_count": 2},
    ),
    "jamba": (
        "jamba",
        "jamba",
        VARIANTS["jamba"][2],
        {
            "attention.head_count_kv": [0, 2, 0, 2], "expert_count": 4, "expert_used_count": 2, "ssm.conv_kernel": 4,
            "ssm.inner_size": 128, "ssm.state_size": 10, "ssm.time_step_rank": 12,
        },
    ),
    "nemotron-3": (
        "nemotron-h",
        "nemotron_h_moe",
        {**NEMOTRON, "time_step_min": 0.001, "n_group": 2, "moe_latent_size": 40, "routed_scaling_factor": 2.5},
        {
            **NEMOTRON_H, "expert_group_count": 2, "expert_group_used_count": 1, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "moe_latent_size": 40,
        },
    ),
}  # fmt: skip

OF_DEEPSEEK_MOE = {
    name: {
        "block_count": 3, "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 20,
        "expert_shared_count": 2, "leading_dense_block_count": num_dense, "expert_weights_scale": 1.0,
        "rope.dimension_count": 16,
    }
    for name, num_dense in (("deepseek", 1), ("bailingmoe", 0))
}  # fmt: skip
"""What the converter writes of them; they are the same model."""

Source = Callable[[str], tuple[Path, str, dict[str, Any]]]


@pytest.fixture
def source(checkpoint: Checkpoints, tmp_path: Path) -> Source:
    """Makes a tiny checkpoint; returns its folder, llama.cpp's name of the architecture, and the file's metadata."""

    def make(name: str) -> tuple[Path, str, dict[str, Any]]:
        if name in OF_DEEPSEEK_MOE:
            metadata = OF_DEEPSEEK_MOE[name]
            make_deepseek_moe(tmp_path / "source", metadata["leading_dense_block_count"])
            return tmp_path / "source", name, metadata
        if name in FAMILIES:
            family, architecture, options, metadata = FAMILIES[name]
            return checkpoint(family, **options), architecture, metadata
        if name in HYBRIDS:
            variant, architecture, options, metadata = HYBRIDS[name]
            kind, model, _ = VARIANTS[variant]
        else:
            kind, model, architecture, options, metadata = BY_CLASSES[name]
        save_hybrid(tmp_path / "source", kind, model, options)
        return tmp_path / "source", architecture, metadata

    return make


BUILDING = Lock()
CHECKED = ("bloom",)
"""Classes that run row by row: ranks build them together, because a step checks them."""


def logits(folder: Path, group: ParallelGroup | None = None) -> Tensor:
    with BUILDING:  # ranks are processes, and do not share Transformers' tables
        model = load_model(read_spec(folder), group=group or ParallelGroup())
    driver = PagedDriver(model, 1, 32)
    return driver.step({0: TOKENS})[0]


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS, *BY_CLASSES, *OF_DEEPSEEK_MOE])
def test_a_file_is_the_checkpoint_that_it_was_made_of(
    name: str, source: Source, checkpoint: Checkpoints, tmp_path: Path, gguf_cache: Path
) -> None:
    """Also on two ranks in blocks of eight bits, beside a file of the same numbers in float32."""
    original, architecture, metadata = source(name)
    tensors, tokenizer = stored_tensors(original, architecture), checkpoint("llama")
    metadata = {**SIZES, **metadata, **stored_values(original)}

    def served(tensors: dict[str, Tensor], kind: str = "F32") -> tuple[Path, dict[str, Tensor]]:
        path = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}.gguf"
        held = write_gguf(
            path, architecture, {**SIZES, **metadata, **stored_values(original)}, tensors, tokenizer, kind
        )
        return make_folder(parts_of(path)), held

    folder, _ = served(tensors)
    torch.testing.assert_close(logits(folder), logits(original), atol=5e-4, rtol=1e-4)  # of decays, exp is stored
    folder, held = served(tensors, "Q8_0")
    assert any(not torch.equal(held[each], tensors[each]) for each in held), "nothing was rounded"
    plain, _ = served(held)
    expected = logits(plain)
    num_ranks = 1 if name in CHECKED else 2
    for got in on_every_rank(num_ranks, lambda group: logits(folder, group)):
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


def test_a_rank_has_its_part_of_rows_that_lie_apart(
    source: Source, checkpoint: Checkpoints, tmp_path: Path, gguf_cache: Path
) -> None:
    """Of a layer with queries, keys and values by head, as numbers and as blocks."""
    original, architecture, metadata = source("bloom")
    path = tmp_path / "bloom.gguf"
    tensors = stored_tensors(original, architecture)
    write_gguf(path, architecture, {**SIZES, **metadata}, tensors, checkpoint("llama"), "Q8_0")
    name, shape = "transformer.h.1.self_attention.query_key_value", (192, 64)
    with closing(model_context(read_spec(make_folder(parts_of(path)))).weights) as weights:
        for kind, size, dtype in (("weight", shape, torch.uint8), ("weight", shape, None), ("bias", shape[:1], None)):
            whole = weights.read(f"{name}.{kind}", size, None, dtype)
            for first, last in ((0, 96), (96, 192), (48, 144)):
                assert torch.equal(
                    weights.read(f"{name}.{kind}", size, Shard(0, first, last), dtype), whole[first:last]
                )  # fmt: skip
        expected = load_file(original / "model.safetensors")[f"{name}.weight"]
        torch.testing.assert_close(weights.read(f"{name}.weight", shape), expected, atol=0.02, rtol=0)
