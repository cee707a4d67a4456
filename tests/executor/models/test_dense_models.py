"""Dense families besides Llama's against Transformers: log-probabilities, greedy tokens, ranks, and older configs."""

import contextlib
from dataclasses import replace
from typing import Any, Literal

import msgspec
import pytest
import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.models.base import Model, StepContext
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.ops.backend import Backend
from quire.ops.cpu.native import NativeBackend
from quire.ops.recording import Recording
from tests.checkpoints import Family
from tests.executor.models.test_models import expected_logprobs, prompts
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 32.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.0 + i for i in range(6)],
    "partial_rotary_factor": 0.75,
}  # fmt: skip
OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
GEMMA3N = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 310, "laurel_rank": 8}
HALF_ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
ONE_OF_FOUR = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {"tie": True}),
    "cohere-biases": ("cohere", {"attention_bias": True, "logit_scale": 0.7}),
    "cohere-norms": ("cohere", {"use_qk_norm": True}),
    "cohere2-window": ("cohere2", {"tie": True, "sliding_window": 12, "num_hidden_layers": 4, "logit_scale": 0.5}),
    "falcon": (
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96, "tie": True},
    ),
    "falcon-one-norm": (
        "falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True, "num_kv_heads": 1},
    ),
    "falcon-7b": ("falcon", {"tie": True}),
    "falcon-rw": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "seed": 2}),
    "gemma": ("gemma", {"tie": True, "head_dim": 24}),
    "gemma2-window": (
        "gemma2",
        {
            "tie": True, "sliding_window": 12, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma2-uncapped": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3n": (
        "gemma3n",
        {
            **GEMMA3N, "tie": True, "sliding_window": 12, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "gemma3n-no-sharing": (
        "gemma3n",
        {
            **GEMMA3N, "altup_num_inputs": 2, "altup_active_idx": 1, "altup_correct_scale": False,
            "attention_bias": True, "num_kv_shared_layers": 0, "final_logit_softcapping": 5.0,
            "intermediate_size": [64, 96],
        },
    ),
    "gemma4": (
        "gemma4",
        {
            "tie": True, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 320, "sliding_window": 12,
            "num_hidden_layers": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 3, "final_logit_softcapping": 5.0,
        },
    ),
    "glm": ("glm", {"attention_bias": True, "head_dim": 16}),
    "glm4": ("glm4", {"attention_bias": True, "head_dim": 24, "rope": HALF_ROPE}),
    "gpt2": ("gpt2", {}),
    "gpt2-options": (
        "gpt2", {
            "n_inner": 100, "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "gelu",
        },
    ),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-in-turn": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False,
         "rope": HALF_ROPE, "tie": True},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 3.0,
        },
    ),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3}),
    "olmo2": ("olmo2", {}),
    "olmo3-window": (
        "olmo3",
        {"sliding_window": 12, "layer_types": ONE_OF_FOUR, "num_hidden_layers": 4, "rope": OLMO3_ROPE},
    ),
    "openai-gpt": ("openai_gpt", {"tie": True}),
    "openai-gpt-relu": ("openai_gpt", {"afn": "relu", "seed": 1}),
    "opt": ("opt", {"ffn_dim": 100, "word_embed_proj_dim": 64, "tie": True}),
    "opt-plain": (
        "opt",
        {
            "ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False, "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 12, "tie": True}),
    "starcoder2-window": ("starcoder2", {"sliding_window": 12, "tie": True}),
    "starcoder2-plain": ("starcoder2", {"use_bias": False}),
    "phi4-mini": ("phi3", {"rope": LONGROPE, "num_key_value_heads": 1, "original_max_position_embeddings": 2048}),
}  # fmt: skip


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(variant: str, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    folder = checkpoint(family, **options)
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
    output = PagedDriver(model, 1, 100).greedy([prompt], 64)[0]
    likeliest = expected_logprobs(folder, prompt + output)[len(prompt) - 1 : -1].argmax(dim=-1)
    assert output == likeliest.tolist()
    assert len(set(output)) > 4, "a degenerate output proves little"


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_and_last_tokens_are_those_of_the_whole(variant: str, checkpoint: Checkpoints) -> None:
    """Two ranks; and steps in which only each request's last token has an output."""
    family, options = VARIANTS[variant]
    spec = read_spec(checkpoint(family, **options))
    some = [list(range(40)), [5], list(range(90, 107))]

    def logits(group: ParallelGroup, *, only_last: bool = False) -> list[Tensor]:
        driver = PagedDriver(load_model(spec, group=group), 3, 64)
        feeds = dict(enumerate(some)), {0: [3], 1: [4], 2: [9]}
        return [part[-1:] for feed in feeds for part in driver.step(feed, only_last=only_last).values()]

    whole = logits(ParallelGroup())
    for others in (logits(ParallelGroup(), only_last=True), *on_every_rank(2, logits)):
        for got, expected in zip(others, whole, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "options"), [("olmo2", {}), ("cohere", {"use_qk_norm": True})])
def test_more_ranks_than_kv_heads_normalize_queries_and_keys(
    family: Family, options: dict[str, Any], checkpoint: Checkpoints
) -> None:
    spec = read_spec(checkpoint(family, **options))

    def logits(group: ParallelGroup) -> Tensor:
        return PagedDriver(load_model(spec, group=group), 1, 64).step({0: list(range(40))})[0]

    whole = logits(ParallelGroup())
    for got in on_every_rank(4, logits):
        torch.testing.assert_close(got, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["cohere2", "gemma2", "gpt2", "olmo2"])
def test_half_precision_stays_near(family: Family, dtype: str, checkpoint: Checkpoints) -> None:
    folder = checkpoint(family)
    model = load_model(read_spec(folder, dtype=dtype))
    token_ids = list(range(3, 60))
    driver = PagedDriver(model, 1, 64, dtype=getattr(torch, dtype))
    got = driver.step({0: token_ids})[0].float().log_softmax(dim=-1)
    difference = (got - expected_logprobs(folder, token_ids)).abs()
    assert difference.mean() < (0.1 if dtype == "bfloat16" else 0.02)


@pytest.mark.parametrize(
    ("family", "options", "older"),
    [
        ("cohere2", {"sliding_window": 9, "num_hidden_layers": 4}, {"layer_types": None, "sliding_window_pattern": 4}),
        ("gemma2", {"sliding_window": 9}, {"layer_types": None}),
        (
            "olmo3",
            {"sliding_window": 9, "num_hidden_layers": 4, "rope": OLMO3_ROPE},
            {
                "layer_types": None, "rope_parameters": None, "rope_theta": 500.0,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
        ),
        (
            "phi3",
            {"rope": LONGROPE, "original_max_position_embeddings": 64},
            {
                "rope_parameters": None, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
                "rope_scaling": {
                    "type": "longrope", "factor": 32.0,
                    "short_factor": LONGROPE["short_factor"], "long_factor": LONGROPE["long_factor"],
                },
            },
        ),
    ],
)  # fmt: skip
def test_older_configs_mean_the_same(
    family: str, options: dict[str, Any], older: dict[str, Any], checkpoint: Checkpoints
) -> None:
    folder = checkpoint(family, **options)
    logits = [
        PagedDriver(load_model(read_spec(folder, **config)), 1, 64).step({0: list(range(60))})[0]
        for config in ({}, older)
    ]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=0)


def test_long_contexts_choose_the_long_factors(checkpoint: Checkpoints) -> None:
    """As Transformers does beyond the original context; there, earlier positions have the long factors, too."""
    folder = checkpoint("phi3", rope=LONGROPE, original_max_position_embeddings=64)
    token_ids = list(range(100))
    got = PagedDriver(load_model(read_spec(folder)), 1, 128).step({0: token_ids})[0]
    torch.testing.assert_close(got.log_softmax(dim=-1), expected_logprobs(folder, token_ids), atol=1e-4, rtol=0)


def test_settings_that_a_file_does_not_read_are_left_to_transformers(checkpoint: Checkpoints) -> None:
    """Those of OPT 350M, and an activation of nobody's."""
    opt = checkpoint("opt", ffn_dim=100, word_embed_proj_dim=32, do_layer_norm_before=False)
    for folder, message in ((opt, "has no file here"), (checkpoint("llama", hidden_act="tanh"), "hidden_act 'tanh'")):
        spec, token_ids = read_spec(folder), list(range(5, 40))
        got = PagedDriver(load_model(spec), 1, 64).step({0: token_ids})[0].log_softmax(dim=-1)
        torch.testing.assert_close(got, expected_logprobs(folder, token_ids), atol=1e-4, rtol=0)
        with pytest.raises(ModelLoadError, match=message):
            load_model(msgspec.structs.replace(spec, implementation="quire"))


def test_more_tokens_than_learned_positions_are_refused(checkpoint: Checkpoints) -> None:
    spec = read_spec(checkpoint("gpt2"), max_position_embeddings=100)
    context = model_context(spec)
    with pytest.raises(ModelLoadError, match="101 exceeds the model's 100 learned positions"):
        build_model(spec, replace(context, max_model_len=101))


class _Recorded:
    """A model whose forward passes are recorded."""

    def __init__(self, model: Model, ops: Backend) -> None:
        self._model = model
        self._ops = ops
        self.kv_layers, self.compute_logits = model.kv_layers, model.compute_logits
        self.recording: Recording | None = None
        self.result = torch.empty(0)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        self._inputs = token_ids, step  # a recording reads their memory
        self.result, self.recording = self._ops.record(lambda: self._model.forward(token_ids, step))
        return self.result.clone()


@pytest.mark.turns(4)
@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_decode_steps_are_operations_of_the_backend_alone(
    variant: str, weights: Literal["int8", "bfloat16"], checkpoint: Checkpoints
) -> None:
    """So they can be recorded; oneDNN's layers, which bfloat16 has where a processor cannot multiply it, cannot."""
    family, options = VARIANTS[variant]
    spec = msgspec.structs.replace(read_spec(checkpoint(family, **options)), dtype="bfloat16")
    context = model_context(spec, quantization="int8" if weights == "int8" else None)
    if not isinstance(context.ops, NativeBackend):
        pytest.skip("plain torch is not recorded")
    if weights == "bfloat16" and "no bfloat16 products" in context.ops.layout:
        pytest.skip("oneDNN multiplies bfloat16 here")
    with contextlib.closing(context.weights):
        model = build_model(spec, context)
    driver = PagedDriver(model, 2, 64)
    driver.step({0: list(range(40)), 1: [5, 6]})
    driver.model = recorded = _Recorded(model, context.ops)  # type: ignore[assignment]
    driver.step({0: [3], 1: [4]})
    assert recorded.recording is not None
    expected = recorded.result.clone()
    recorded.result.zero_()
    recorded.recording.run()
    assert torch.equal(recorded.result, expected)
