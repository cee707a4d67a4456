"""Families with mixtures of experts against Transformers, on one rank and on two."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.ops.cpu.native import NativeBackend
from tests.executor.models.test_dense_models import _Recorded as Recorded
from tests.executor.models.test_models import expected_logprobs, prompts
from tests.executor.paged_driver import Checkpoints, PagedDriver, batch_tolerance, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

PARTS = ("gate", "up", "down")
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5_moe": ("ernie4_5_moe", {"num_hidden_layers": 3}),
    "ernie4_5_moe-some-layers": (
        "ernie4_5_moe",
        {"num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_end_index": 2, "moe_num_shared_experts": 0},
    ),
    "glm4_moe": ("glm4_moe", {"num_hidden_layers": 3, "routed_scaling_factor": 1.5}),
    "glm4_moe-groups": (
        "glm4_moe",
        {
            "n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False,
            "n_shared_experts": 2, "first_k_dense_replace": 0, "head_dim": 24,
        },
    ),
    "gpt_oss": ("gpt_oss", {"sliding_window": 12}),
    "granite_moe": (
        "granite_moe",
        {
            "tie": True, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "gemma4": (
        "gemma4",
        {
            "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 28,
            "hidden_size_per_layer_input": 0, "sliding_window": 12, "attention_k_eq_v": True, "global_head_dim": 24,
            "num_global_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama4": (
        "llama4",
        {
            "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1], "attention_chunk_size": 24, "floor_scale": 16,
            "attn_scale": 0.5, "interleave_moe_layer_step": 2,
        },
    ),
    "llama4-scaled-rope": (
        "llama4",
        {
            "rope": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
                "attention_factor": 1.6,
            },
            "rms_norm_eps": 1e-2, "attn_temperature_tuning": False,
        },
    ),
    "llama4-plain": (
        "llama4",
        {"use_qk_norm": False, "attn_temperature_tuning": False, "num_experts_per_tok": 2, "attention_bias": True},
    ),
    "minimax_m2": ("minimax_m2", {"head_dim": 32, "rope": PARTIAL}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 12}),
    "olmoe": ("olmoe", {}),
    "olmoe-norm": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "phimoe": ("phimoe", {"lm_head_bias": True, "attention_bias": True}),
    "phimoe-window": ("phimoe", {"sliding_window": 12}),
    "qwen2_moe": ("qwen2_moe", {"tie": True}),
    "qwen2_moe-dense-layers": (
        "qwen2_moe",
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen2_moe-window": ("qwen2_moe", {"num_hidden_layers": 4, "sliding_window": 12, "use_sliding_window": True}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe-window": ("qwen3_moe", {"head_dim": 32, "sliding_window": 12, "attention_bias": True}),
}  # fmt: skip

FAMILIES = [
    "ernie4_5_moe",
    "glm4_moe-groups",
    "gemma4",
    "gpt_oss",
    "llama4",
    "granite_moe",
    "minimax_m2",
    "olmoe",
    "mixtral",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
]
"""One variant each."""


@pytest.fixture(params=VARIANTS)
def folder(request: pytest.FixtureRequest, checkpoint: Checkpoints) -> Path:
    family, options = VARIANTS[request.param]
    return checkpoint(family, **options)


@pytest.mark.turns(4)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    spec = read_spec(folder)
    model = load_model(spec)
    token_ids = prompts(1, spec.vocab_size)[0] + list(range(5, 70))

    # In chunks, the last tokens one by one, beside another request.
    driver = PagedDriver(model, 2, 200, block_size=4)
    got = []
    position = 0
    for size in [16, 1, 30, 20, *[1] * len(token_ids)]:
        part = token_ids[position : position + size]
        if part:
            got.append(driver.step({1: [7, 8, 9, 10], 0: part} if position % 3 == 0 else {0: part})[0])
        position += size
    expected = expected_logprobs(folder, token_ids)
    torch.testing.assert_close(torch.cat(got).log_softmax(dim=-1), expected, atol=1e-4, rtol=0)

    # One pass checks that each output is the likeliest token after those before it: by induction, greedy search.
    prompt = token_ids[:20]
    output = PagedDriver(model, 1, 100, block_size=4).greedy([prompt], 64)[0]
    likeliest = expected_logprobs(folder, prompt + output)[len(prompt) - 1 : -1].argmax(dim=-1)
    assert output == likeliest.tolist()
    assert len(set(output)) > 8, "a degenerate output proves little"


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", FAMILIES)
def test_tokens_do_not_depend_on_the_batch(variant: str, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    spec = read_spec(checkpoint(family, **options))
    model = load_model(spec)
    many = prompts(17, spec.vocab_size)
    together, alone = PagedDriver(model, len(many), 80), PagedDriver(model, 1, 80)
    tolerance = batch_tolerance(together.ops)
    logits = together.step(dict(enumerate(many)))[11]
    torch.testing.assert_close(alone.step({0: many[11]})[0], logits, atol=tolerance, rtol=0)
    logits = together.step({row: [row + 3] for row in range(len(many))})[11]
    torch.testing.assert_close(alone.step({0: [14]})[0], logits, atol=tolerance, rtol=0)


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", FAMILIES)
def test_ranks_together_are_the_whole_model(variant: str, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    spec = read_spec(checkpoint(family, **options))
    some = dict(enumerate(prompts(3, spec.vocab_size)))

    def logits(group: ParallelGroup) -> list[Tensor]:
        driver = PagedDriver(load_model(spec, group=group), 3, 80)
        return [*driver.step(some).values(), *driver.step({0: [3], 1: [4], 2: [9]}).values()]

    whole = logits(ParallelGroup())
    for rank_logits in on_every_rank(2, logits):
        for got, expected in zip(rank_logits, whole, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_experts_may_be_stored_in_two_tensors(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe", **VARIANTS["qwen3_moe"][1])
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        experts = [{part: tensors.pop(f"{name}.{i}.{part}_proj.weight") for part in PARTS} for i in range(9)]
        gates, ups, downs = (torch.stack([expert[part] for expert in experts]) for part in PARTS)
        tensors |= {f"{name}.gate_up_proj": torch.cat((gates, ups), dim=1), f"{name}.down_proj": downs}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    apart, together = (
        PagedDriver(load_model(read_spec(path)), 1, 64).step({0: list(range(30))})[0] for path in (folder, tmp_path)
    )
    assert torch.equal(apart, together)


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", FAMILIES)
@torch.inference_mode()
def test_decode_steps_are_operations_of_the_backend_alone(variant: str, checkpoint: Checkpoints) -> None:
    """So they can be recorded. In one byte a weight, because oneDNN's layers cannot."""
    family, options = VARIANTS[variant]
    context = model_context(read_spec(checkpoint(family, **options)), quantization="int8")
    if not isinstance(context.ops, NativeBackend):
        pytest.skip("plain torch is not recorded")
    with contextlib.closing(context.weights):
        model = build_model(read_spec(checkpoint(family, **options)), context)
    driver = PagedDriver(model, 2, 64)
    driver.step({0: list(range(40)), 1: [5, 6]})
    driver.model = recorded = Recorded(model, context.ops)  # type: ignore[assignment]
    driver.step({0: [3], 1: [4]})
    assert recorded.recording is not None
    expected = recorded.result.clone()
    recorded.result.zero_()
    recorded.recording.run()
    assert torch.equal(recorded.result, expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_local_experts": None}, "lacks 'num_experts'"),
        ({"num_experts_per_tok": 12}, "12 experts a token; the model has 9"),
        ({"moe_intermediate_size": 40}, r"experts.0.gate_proj.weight.*\[36, 64\].*\[40, 64\]"),
        (
            {"num_local_experts": 10},
            "no tensor 'model.layers.0.mlp.experts.9.gate_proj.weight|mlp.gate.weight.*\\[9, 64",
        ),
        ({"hidden_act": "cubic"}, "hidden_act 'cubic'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    overrides: dict[str, Any], message: str, checkpoint: Checkpoints
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(read_spec(checkpoint("qwen3_moe"), **overrides))
