"""Models with recurrent layers against Transformers: log-probabilities at each position, greedy tokens, ranks."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BailingHybridConfig,
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen4ExpTextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    Zamba2Config,
    xLSTMConfig,
)

from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.ops.cpu.native import NativeBackend
from tests.executor.models.test_dense_models import _Recorded as Recorded
from tests.executor.models.test_models import expected_logprobs, prompts
from tests.executor.paged_driver import PagedDriver, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank
from tests.executor.weights.test_quantized_checkpoints import FORMATS, logprobs_of, write

torch.set_num_threads(1)

COMMON = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
DELTA = {
    "head_dim": 24, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 12, "linear_value_head_dim": 20,
}  # fmt: skip
QWEN4 = {
    **DELTA, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24, "hc_count": 3, "hc_lowrank": 20, "indexer_n_heads": 8, "indexer_kv_heads": 1,
    "indexer_head_dim": 20, "indexer_budget": 16, "indexer_compress_ratio": 4, "ngram_vocab_size_base": 50,
    "heads_per_ngram": 2, "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 3,
}  # fmt: skip
MAMBA2 = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 12, "conv_kernel": 4}

XLSTM = {
    "num_heads": 4, "qk_dim_factor": 1.0, "gate_soft_cap": 4.0, "output_logit_soft_cap": 9.0, "num_hidden_layers": 2,
    "num_blocks": 2,
}  # fmt: skip

MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_d_conv": 3,
    "mamba_expand": 2,
}  # fmt: skip

ZAMBA2 = {
    "num_hidden_layers": 3, "n_mamba_heads": 8, "mamba_d_state": 20, "adapter_rank": 6,
    "tie_word_embeddings": True,  # Transformers shares no blocks without it
}  # fmt: skip

NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "num_hidden_layers": 4,
    "ssm_state_size": 20, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "head_dim": 24,
    "time_step_min": 0.2, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 44,
}  # fmt: skip

KIMI = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "moe_intermediate_size": 28, "num_local_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip

VARIANTS: dict[str, tuple[type[PretrainedConfig], str, dict[str, Any]]] = {
    "kimi-linear": (
        KimiLinearConfig,
        "KimiLinearForCausalLM",
        {
            **KIMI,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3, 4],
                "head_dim": 16,
                "num_heads": 6,
                "short_conv_kernel_size": 3,
            },
        },
    ),
    "kimi-linear-last-attends": (
        KimiLinearConfig,
        "KimiLinearForCausalLM",
        {
            **KIMI,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_head_dim": 24,
            "linear_num_heads": 2,
            "q_lora_rank": 20,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "lfm2": (
        Lfm2Config,
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 32, "conv_L_cache": 4},
    ),
    "lfm2-biases": (
        Lfm2Config,
        "Lfm2ForCausalLM",
        {"full_attn_idxs": [0, 3], "conv_bias": True, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-moe": (
        Lfm2MoeConfig,
        "Lfm2MoeForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm3": (
        Lfm3Config,
        "Lfm3ForCausalLM",
        {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "sliding_window": 24, "head_dim": 16},
    ),
    "lfm3-plain": (
        Lfm3Config,
        "Lfm3ForCausalLM",
        {
            "num_hidden_layers": 6,
            "head_dim": 24,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mamba2": (Mamba2Config, "Mamba2ForCausalLM", MAMBA2),
    "mamba2-limits": (
        Mamba2Config,
        "Mamba2ForCausalLM",
        {**MAMBA2, "time_step_limit": [0.3, 0.9], "use_bias": True, "use_conv_bias": False, "n_groups": 1},
    ),
    "bailing-hybrid": (
        BailingHybridConfig,
        "BailingHybridForCausalLM",
        {**KIMI, "layer_group_size": 2, "first_k_dense_replace": 1, "head_dim": 8, "n_group": 2, "topk_group": 1},
    ),
    "bailing-hybrid-unbounded": (
        BailingHybridConfig,
        "BailingHybridForCausalLM",
        {
            **KIMI,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "kda_safe_gate": False,
            "head_dim": 20,
            "qk_rope_head_dim": 20,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 0,
        },
    ),
    "bamba": (BambaConfig, "BambaForCausalLM", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "bamba-biases": (
        BambaConfig,
        "BambaForCausalLM",
        {
            **MAMBA,
            "attn_layer_indices": [0],
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.2, 1.5],
        },
    ),
    "falcon-h1": (
        FalconH1Config,
        "FalconH1ForCausalLM",
        {
            **MAMBA,
            "mamba_d_ssm": 128,
            "num_hidden_layers": 2,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.75,
            "lm_head_multiplier": 0.9,
            "embedding_multiplier": 1.3,
            "mlp_multipliers": [0.8, 0.7],
            "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
        },
    ),
    "falcon-h1-norm": (
        FalconH1Config,
        "FalconH1ForCausalLM",
        {
            **MAMBA,
            "mamba_d_ssm": 128,
            "num_hidden_layers": 2,
            "mamba_rms_norm": True,
            "mamba_n_groups": 1,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "attention_in_multiplier": 0.9,
            "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
        },
    ),
    "falcon-mamba": (
        FalconMambaConfig,
        "FalconMambaForCausalLM",
        {"state_size": 12, "time_step_rank": 7},
    ),
    "granite-hybrid": (
        GraniteMoeHybridConfig,
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 1.5,
            "logits_scaling": 1.2,
            "attention_multiplier": 0.2,
            "position_embedding_type": "rope",
        },
    ),
    "granite-hybrid-dense": (
        GraniteMoeHybridConfig,
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 48,
            "attention_multiplier": 0.2,
        },
    ),
    "jamba": (
        JambaConfig,
        "JambaForCausalLM",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 12, "mamba_d_state": 10},
    ),
    "mamba": (
        MambaConfig,
        "MambaForCausalLM",
        {"state_size": 16, "time_step_rank": 5, "use_bias": True, "use_conv_bias": False},
    ),
    "minimax": (
        MiniMaxConfig,
        "MiniMaxForCausalLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "block_size": 32,
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 0.8,
            "full_attn_alpha_factor": 1.2,
            "full_attn_beta_factor": 0.7,
            "mlp_alpha_factor": 1.1,
            "mlp_beta_factor": 0.9,
        },
    ),
    "nemotron-h": (
        NemotronHConfig,
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
            "num_hidden_layers": 5,
            "ssm_state_size": 20,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "head_dim": 24,
            "time_step_min": 0.2,
        },
    ),
    "nemotron-h-experts": (
        NemotronHConfig,
        "NemotronHForCausalLM",
        {**NEMOTRON, "n_group": 2, "moe_latent_size": 40, "mlp_bias": True},
    ),
    "nemotron-h-whole-experts": (
        NemotronHConfig,
        "NemotronHForCausalLM",
        {**NEMOTRON, "routed_scaling_factor": 2.5, "norm_topk_prob": False},
    ),
    "olmo-hybrid": (
        OlmoHybridConfig,
        "OlmoHybridForCausalLM",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "olmo-hybrid-without-positions": (
        OlmoHybridConfig,
        "OlmoHybridForCausalLM",
        {
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
        },
    ),
    "qwen3.5": (Qwen3_5TextConfig, "Qwen3_5ForCausalLM", {**DELTA, "rms_norm_eps": 1e-5}),
    "qwen3.5-last-recurrent": (
        Qwen3_5TextConfig,
        "Qwen3_5ForCausalLM",
        {
            **DELTA,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "attention_bias": True,
        },
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        "Qwen3_5MoeForCausalLM",
        {
            **DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3-next": (
        Qwen3NextConfig,
        "Qwen3NextForCausalLM",
        {
            **DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-next-dense": (Qwen3NextConfig, "Qwen3NextForCausalLM", {**DELTA, "mlp_only_layers": [0, 1, 2, 3]}),
    "qwen4-exp": (
        Qwen4ExpTextConfig,
        "Qwen4ExpForCausalLM",
        {**QWEN4, "layer_types": ["linear_attention", "indexed_attention"] * 2, "ple_layer_ids": [1, 3]},
    ),
    "qwen4-exp-last-recurrent": (
        Qwen4ExpTextConfig,
        "Qwen4ExpForCausalLM",
        {
            **QWEN4,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "ple_layer_ids": [4],
            "ple_embed_dim": 54,
            "ple_conv_kernel_size": 3,
            "ngram_size": 4,
            "heads_per_ngram": 3,
            "output_gate_type": "sigmoid",
            "attention_bias": True,
            "indexer_compress_ratio": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "rwkv": (RwkvConfig, "RwkvForCausalLM", {"rescale_every": 2, "layer_norm_epsilon": 1e-3}),
    "xlstm": (xLSTMConfig, "xLSTMForCausalLM", {**XLSTM, "eps": 1e-3}),
    "recurrent-gemma": (
        RecurrentGemmaConfig,
        "RecurrentGemmaForCausalLM",
        {"block_types": ["recurrent", "attention"], "attention_window_size": 24},
    ),
    "zamba2": (
        Zamba2Config,
        "Zamba2ForCausalLM",
        {
            **ZAMBA2,
            "layers_block_type": ["hybrid", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "num_key_value_heads": 4,
            "use_mem_rope": True,
        },
    ),
    "zamba2-one-block": (
        Zamba2Config,
        "Zamba2ForCausalLM",
        {
            **ZAMBA2,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "add_bias_linear": True,
            "mamba_ngroups": 2,
            "time_step_min": 0.2,
        },
    ),
}

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Tiny random checkpoints of `VARIANTS`, made when first asked for."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp("hybrid") / variant
            save_hybrid(made[variant], *VARIANTS[variant])
        return made[variant]

    return make


def save_hybrid(folder: Path, kind: type[PretrainedConfig], architecture: str, options: dict[str, Any]) -> None:
    config = kind(**{**COMMON, **options, "architectures": [architecture]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if "A_log" in name:
            value = noise.abs()
        elif parameter.dim() == 1:
            value = parameter.detach() + 0.2 * noise
        elif ("embed" in name and not config.tie_word_embeddings) or "conv1d" in name:
            value = noise
        else:
            value = noise / parameter.shape[-1] ** 0.5
        parameter.data.copy_(value)
    model.save_pretrained(folder)
    config_file = folder / "config.json"
    written = json.loads(config_file.read_text())
    facts = {"architectures": [architecture], "num_hidden_layers": config.num_hidden_layers}
    config_file.write_text(json.dumps({**written, **facts}))


def run_in_parts(driver: PagedDriver, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of `token_ids`, computed in chunks, then one by one, now and then beside another request."""
    got, position = [], 0
    for size in [16, 1, 30, 20, *[1] * len(token_ids)]:
        part = token_ids[position : position + size]
        if part:
            got.append(driver.step({1: [7, 8, 9, 10], 0: part} if position % 3 == 0 else {0: part})[0])
        position += size
    return torch.cat(got).log_softmax(dim=-1)


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(variant: str, folder: Folder) -> None:
    spec = read_spec(folder(variant))
    model = load_model(spec)
    token_ids = prompts(1, spec.vocab_size)[0] + list(range(5, 70))
    expected = expected_logprobs(folder(variant), token_ids)
    got = run_in_parts(PagedDriver(model, 2, 200), token_ids)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)  # plain torch comes to 1.001e-4

    prompt = token_ids[:20]
    output = PagedDriver(model, 1, 100).greedy([prompt], 64)[0]
    likeliest = expected_logprobs(folder(variant), prompt + output)[len(prompt) - 1 : -1].argmax(dim=-1)
    assert output == likeliest.tolist()
    assert len(set(output)) > 8, "a degenerate output proves little"


@pytest.mark.parametrize("option", [{"use_bias": True}, {"weight_mode": "fused"}], ids=str)
def test_forms_of_xlstm_that_no_checkpoint_has_are_refused(option: dict[str, Any], folder: Folder) -> None:
    with pytest.raises(ModelLoadError, match="with use_bias, or with a weight_mode other than single, is not"):
        load_model(read_spec(folder("xlstm"), **option))


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_counted_before_loading(variant: str, folder: Folder) -> None:
    spec = read_spec(folder(variant))
    for rank in range(2):
        group = ParallelGroup(rank, 2)
        with contextlib.closing((context := model_context(spec, group=group)).weights), torch.inference_mode():
            counted = held_bytes(dry_build(spec, context))
        assert counted == pytest.approx(held_bytes(load_model(spec, group=group)), rel=0.02)


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_do_not_depend_on_the_batch(variant: str, folder: Folder) -> None:
    spec = read_spec(folder(variant))
    model = load_model(spec)
    many = prompts(9, spec.vocab_size)
    together = PagedDriver(model, len(many), 128).greedy(many, 24)
    for row in (0, 4, 8):
        assert PagedDriver(model, 1, 128).greedy([many[row]], 24)[0] == together[row]


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_last_tokens_alone_are_those_of_the_whole(variant: str, folder: Folder) -> None:
    """When only the last tokens' logits are wanted, the states still take in all tokens."""
    spec = read_spec(folder(variant))
    model = load_model(spec)
    whole, last = PagedDriver(model, 5, 128), PagedDriver(model, 5, 128)
    some = dict(enumerate(prompts(4, spec.vocab_size)))
    for feed in (some, {4: [3, 4, 5], 1: [6], 0: [7, 8]}, {row: [9] for row in range(5)}):
        expected, got = whole.step(feed), last.step(feed, only_last=True)
        for row in feed:
            torch.testing.assert_close(got[row], expected[row][-1:], atol=1e-5, rtol=0)
    for states, others in zip(last.states, whole.states, strict=True):
        for state, other in zip(states, others, strict=True):
            torch.testing.assert_close(state, other, atol=1e-5, rtol=0)


def test_layer_types_beyond_the_stated_number_of_layers_are_not_read(folder: Folder) -> None:
    """Or else no layer would be the last one, which drops the tokens whose logits nobody wants."""
    spec = read_spec(folder("lfm2-moe"), num_hidden_layers=2)
    assert len(spec.hf_config["layer_types"]) > 2
    model, tokens = load_model(spec), [5, 6, 7, 8]
    whole = PagedDriver(model, 1, 32).step({0: tokens})[0]
    last = PagedDriver(model, 1, 32).step({0: tokens}, only_last=True)[0]
    torch.testing.assert_close(last, whole[-1:], atol=1e-5, rtol=0)


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_together_are_the_whole_model(variant: str, folder: Folder) -> None:
    spec = read_spec(folder(variant))

    def logits(group: ParallelGroup) -> list[torch.Tensor]:
        driver = PagedDriver(load_model(spec, group=group), 2, 64)
        return [*driver.step({0: list(range(40)), 1: [5]}).values(), *driver.step({0: [3], 1: [4]}).values()]

    whole = logits(ParallelGroup())
    for rank_logits in on_every_rank(2, logits):
        for got, expected in zip(rank_logits, whole, strict=True):
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("qwen4")])
@torch.inference_mode()
def test_decode_steps_are_operations_of_the_backend_alone(variant: str, folder: Folder) -> None:
    """So they can be recorded. In one byte a weight, because oneDNN's layers cannot."""
    context = model_context(read_spec(folder(variant)), quantization="int8")
    if not isinstance(context.ops, NativeBackend):
        pytest.skip("plain torch is not recorded")
    with contextlib.closing(context.weights):
        model = build_model(read_spec(folder(variant)), context)
    driver = PagedDriver(model, 2, 64)
    driver.step({0: list(range(40)), 1: [5, 6]})
    states = [tensor for layer in driver.states for tensor in layer]
    before = [tensor.clone() for tensor in states]
    driver.model = recorded = Recorded(model, context.ops)  # type: ignore[assignment]
    driver.step({0: [3], 1: [4]})
    assert recorded.recording is not None
    expected, after = recorded.result.clone(), [tensor.clone() for tensor in states]
    recorded.result.zero_()
    for tensor, old in zip(states, before, strict=True):
        tensor.copy_(old)
    recorded.recording.run()
    assert torch.equal(recorded.result, expected)
    for tensor, new in zip(states, after, strict=True):
        assert torch.equal(tensor, new)


def test_multipliers_are_those_of_quantized_layers_too(folder: Folder, tmp_path: Path) -> None:
    layers = re.compile(r"model\.layers\.\d+\.(self_attn|mamba|feed_forward)\..*proj\.weight")
    packed, plain = write(folder("falcon-h1"), tmp_path, FORMATS["ct-w4-zeros"], layers)
    expected, logprobs = logprobs_of(plain)(ParallelGroup()), logprobs_of(packed)
    for got in (logprobs(ParallelGroup()), *on_every_rank(2, logprobs)):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
