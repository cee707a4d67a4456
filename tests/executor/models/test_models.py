"""Every model family against Transformers: log-probabilities at each position, greedy tokens, and refusals."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import ShapeReader, dry_build
from tests.executor.paged_driver import Checkpoints, PagedDriver, batch_tolerance, load_model, model_context, read_spec

torch.set_num_threads(1)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 8.0},
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-window": ("gemma3", {"tie": True, "sliding_window": 8, "num_hidden_layers": 8}),
    "gemma3-cap": ("gemma3", {"final_logit_softcapping": 4.0}),
    "gemma3-pattern-window": (
        "gemma3",
        {
            "sliding_window": 12,
            "num_hidden_layers": 5,
            "sliding_window_pattern": 2,
            "rope": GEMMA_ROPE,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head_dim": (
        "llama",
        {"head_dim": 24, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-shards": ("llama", {"safetensors_shards": 3}),
    "llama-llama3-rope": ("llama", {"rope": LLAMA3}),
    "llama-yarn-rope": ("llama", {"rope": YARN}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {"tie": True}),
    "qwen2-window": ("qwen2", {"sliding_window": 12, "num_hidden_layers": 4, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3-head_dim": ("qwen3", {"head_dim": 32, "tie": True, "attention_bias": True}),
    "qwen3-window": ("qwen3", {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}),
}


def prompts(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 70, (count,), generator=random).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=random).tolist() for length in lengths]


def expected_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(variant: str, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    folder = checkpoint(family, **options)
    spec = read_spec(folder)
    model = load_model(spec)
    token_ids = prompts(1, spec.vocab_size)[0] + list(range(5, 70))

    # In chunks, the last tokens one by one, beside another request.
    block_size = 4 if "window" in variant else 16
    driver = PagedDriver(model, 2, 200, block_size=block_size)
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
    output = PagedDriver(model, 1, 100, block_size=block_size).greedy([prompt], 64)[0]
    likeliest = expected_logprobs(folder, prompt + output)[len(prompt) - 1 : -1].argmax(dim=-1)
    assert output == likeliest.tolist()
    assert len(set(output)) > 8, "a degenerate output proves little"


@pytest.mark.turns(4)
@pytest.mark.parametrize("variant", ["gemma3-window", "llama", "mistral-window", "qwen3-head_dim"])
def test_tokens_do_not_depend_on_the_batch(variant: str, checkpoint: Checkpoints) -> None:
    family, options = VARIANTS[variant]
    spec = read_spec(checkpoint(family, **options))
    model = load_model(spec)
    many = prompts(33, spec.vocab_size)
    together = PagedDriver(model, len(many), 128).greedy(many, 32)
    for row in (0, 13, 32):
        assert PagedDriver(model, 1, 128).greedy([many[row]], 32)[0] == together[row]


@pytest.mark.parametrize("variant", ["gemma3-window", "llama", "mistral-window", "qwen3-head_dim"])
def test_last_tokens_alone_are_those_of_the_whole(variant: str, checkpoint: Checkpoints) -> None:
    """When only the last tokens' logits are wanted, the cache still gets all tokens, and later tokens stay the same."""
    family, options = VARIANTS[variant]
    spec = read_spec(checkpoint(family, **options))
    model = load_model(spec)
    whole, last = PagedDriver(model, 5, 128), PagedDriver(model, 5, 128)
    assert_same = partial(torch.testing.assert_close, atol=batch_tolerance(whole.ops), rtol=0)
    some = dict(enumerate(prompts(4, spec.vocab_size)))
    for feed in (some, {4: [3, 4, 5], 1: [6], 0: [7, 8]}, {row: [9] for row in range(5)}):
        expected, got = whole.step(feed), last.step(feed, only_last=True)
        for row in feed:
            assert_same(got[row], expected[row][-1:])
    for cache, other in zip(last.caches, whole.caches, strict=True):
        assert_same(cache.pages, other.pages, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_half_precision_stays_near(family: str, dtype: str, checkpoint: Checkpoints) -> None:
    folder = checkpoint(family)
    model = load_model(read_spec(folder, dtype=dtype))
    token_ids = list(range(3, 60))
    driver = PagedDriver(model, 1, 64, dtype=getattr(torch, dtype))
    got = driver.step({0: token_ids})[0].float().log_softmax(dim=-1)
    difference = (got - expected_logprobs(folder, token_ids)).abs()
    assert difference.mean() < (0.1 if dtype == "bfloat16" else 0.02)


def test_old_style_rope_settings(checkpoint: Checkpoints) -> None:
    """Checkpoints from before transformers 5 have rope_theta and rope_scaling instead of rope_parameters."""
    folder = checkpoint("llama", rope=LLAMA3)
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    spec = read_spec(folder, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    token_ids = list(range(100))
    got = PagedDriver(load_model(spec), 1, 100).step({0: token_ids})[0].log_softmax(dim=-1)
    torch.testing.assert_close(got, expected_logprobs(folder, token_ids), atol=1e-4, rtol=0)


def test_gemma_configs_from_before_transformers_5(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """These have a pattern instead of layer types, two bases instead of parameters, and tied weights by default."""
    rope = {**GEMMA_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
    folder = checkpoint("gemma3", tie=True, sliding_window=8, num_hidden_layers=6, sliding_window_pattern=3, rope=rope)
    config = json.loads((folder / "config.json").read_bytes())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    spec = read_spec(
        tmp_path, layer_types=None, sliding_window_pattern=3, rope_parameters=None, rope_local_base_freq=300.0,
        rope_theta=20000.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    token_ids = list(range(100))
    got = PagedDriver(load_model(spec), 1, 100).step({0: token_ids})[0].log_softmax(dim=-1)
    torch.testing.assert_close(got, expected_logprobs(folder, token_ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"use_bidirectional_attention": True}, r"tokens see later ones \(use_bidirectional_attention\)"),
        ({"hidden_activation": "mish"}, "hidden_activation 'mish'.*gelu_pytorch_tanh"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters must say how layers of .*_attention rotate"),
    ],
)
def test_a_gemma_config_that_asks_for_more_is_refused(
    overrides: dict[str, Any], message: str, checkpoint: Checkpoints
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(msgspec.structs.replace(read_spec(checkpoint("gemma3"), **overrides), implementation="quire"))


def test_unknown_architecture_names_the_known_ones(checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelLoadError, match=r"FooForCausalLM.*Supported: .*LlamaForCausalLM, .*MistralForCausalLM"):
        load_model(read_spec(checkpoint("llama"), architectures=["FooForCausalLM"]))
    own_code = {"AutoModelForCausalLM": "modeling_foo.FooForCausalLM"}
    with pytest.raises(ModelLoadError, match=r"FooForCausalLM.*brings code for it, which is not run"):
        load_model(read_spec(checkpoint("llama"), architectures=["FooForCausalLM"], auto_map=own_code))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"intermediate_size": None}, "lacks 'intermediate_size'"),
        ({"intermediate_size": 128}, r"mlp.gate_proj.weight.*\[96, 64\].*\[128, 64\]"),
        ({"num_hidden_layers": 3}, "no tensor 'model.layers.2.*Nearest names"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral'.*yarn"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks a number for 'factor'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    overrides: dict[str, Any], message: str, checkpoint: Checkpoints
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(read_spec(checkpoint("llama"), **overrides))


def test_layer_types_that_are_not_known_are_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelLoadError, match=r"layer_types.*chunked_attention"):
        load_model(read_spec(checkpoint("qwen3"), layer_types=["chunked_attention", "full_attention"]))


def test_a_stage_reads_its_part_of_the_checkpoint_only(checkpoint: Checkpoints) -> None:
    """The ends of a tied vocabulary are both read; a stage in the middle reads neither."""
    spec = read_spec(checkpoint("llama", num_hidden_layers=3, tie=True))

    def reads(layers: range) -> set[str]:
        reader = ShapeReader(torch.float32)
        context = dataclasses.replace(model_context(spec, layers=layers), weights=reader)
        dry_build(spec, context, reader)
        return {read.name.removeprefix("model.").rsplit(".", 1)[0] for read in reader.reads}

    first, middle, last = (reads(range(number, number + 1)) for number in range(3))
    whole = {name for name in reads(range(3)) if not name.startswith("layers.")}
    assert whole == {"embed_tokens", "norm"}
    for number, names in enumerate((first, middle, last)):
        assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {str(number)}
    assert "embed_tokens" in first
    assert "embed_tokens" not in middle
    assert "embed_tokens" in last
