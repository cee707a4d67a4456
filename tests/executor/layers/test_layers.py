"""Layers split over ranks against the whole, and rotary embeddings against Transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.core.config.load import LoadConfig
from quire.core.errors import ModelLoadError
from quire.executor.layers.positions.rotary import rotary_frequencies
from quire.executor.parallel.groups import ParallelGroup
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, read_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)


SHARDED: dict[str, tuple[str, dict[str, Any], int]] = {
    "windows-and-full": ("gemma3", {"num_hidden_layers": 6, "sliding_window": 9, "tie": True}, 2),
    "two-ranks": ("llama", {}, 2),
    "biases-are-added-once": ("llama", {"attention_bias": True, "mlp_bias": True}, 2),
    "more-ranks-than-kv-heads": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}, 4),
    "one-kv-head": ("qwen2", {"num_key_value_heads": 1, "tie": True}, 4),
    "vocabulary-not-divisible": ("mistral", {"vocab_size": 301, "sliding_window": 9}, 4),
    "vocabulary-not-divisible-tied": ("llama", {"vocab_size": 259, "tie": True}, 2),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", SHARDED)
def test_ranks_together_are_the_whole_model(case: str, checkpoint: Checkpoints) -> None:
    family, options, size = SHARDED[case]
    spec = read_spec(checkpoint(family, **options))
    prompts = [list(range(40)), [5], list(range(90, 107))]

    def logits(group: ParallelGroup) -> list[Tensor]:
        driver = PagedDriver(load_model(spec, group=group), 3, 64)
        return [*driver.step(dict(enumerate(prompts))).values(), *driver.step({0: [3], 1: [4], 2: [9]}).values()]

    whole = logits(ParallelGroup())
    for rank_logits in on_every_rank(size, logits):
        for got, expected in zip(rank_logits, whole, strict=True):
            assert got.shape[1] == spec.vocab_size
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_dummy_weights_do_not_depend_on_the_number_of_ranks(checkpoint: Checkpoints) -> None:
    spec = read_spec(checkpoint("qwen2"))

    def logits(group: ParallelGroup) -> Tensor:
        model = load_model(spec, group=group, load=LoadConfig(load_format="dummy"))
        return PagedDriver(model, 1, 32).step({0: list(range(20))})[0]

    whole = logits(ParallelGroup())
    assert whole.std() > 0.1
    torch.testing.assert_close(on_every_rank(2, logits)[1], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (3, {}, "does not divide the model's 4 attention heads"),
        (6, {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 48}, "4 KV heads"),
        (4, {"intermediate_size": 90}, "90 intermediate"),
    ],
)
def test_a_rank_count_that_does_not_fit_is_refused(
    size: int, options: dict[str, Any], message: str, checkpoint: Checkpoints
) -> None:
    spec = read_spec(checkpoint("llama", **options))
    with pytest.raises(ModelLoadError, match=message):
        load_model(spec, group=ParallelGroup(0, size))


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.5},
    "linear-partial": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-untruncated": {
        "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "original_max_position_embeddings": 4096,
        "truncate": False, "beta_fast": 30.0, "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
        "mscale": 0.8, "mscale_all_dim": 1.2,
    },
    "yarn-narrow": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + i / 64 for i in range(32)], "long_factor": [1.0 + i for i in range(32)],
    },
    "longrope-attention-factor": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8192, "factor": 32.0,
        "attention_factor": 1.19, "partial_rotary_factor": 0.5,
        "short_factor": [1.0] * 16, "long_factor": [1.5 + i for i in range(16)],
    },
    "proportional": {
        "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": 2.0,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4096,
        "attention_factor": 1.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("max_model_len", [4096, 65536])
def test_rotary_frequencies_are_those_of_transformers(name: str, max_model_len: int) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=ROPES[name]
    )
    expected, expected_scale = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config, seq_len=max_model_len)
    new_style = config.to_dict()
    block = {key: value for key, value in ROPES[name].items() if key not in ("rope_theta", "partial_rotary_factor")}
    block["type"] = block.pop("rope_type")  # the oldest spelling
    old_style = {
        "max_position_embeddings": 16384,
        "rope_theta": ROPES[name]["rope_theta"],
        "rope_scaling": block,
        "partial_rotary_factor": ROPES[name].get("partial_rotary_factor", 1.0),
    }
    nested = {**new_style, "rope_parameters": {"full_attention": new_style["rope_parameters"]}}
    frequencies, scale = rotary_frequencies(nested, 64, max_model_len, "full_attention")
    torch.testing.assert_close(frequencies, expected, rtol=1e-5, atol=1e-9)
    for written in (new_style, old_style):
        frequencies, scale = rotary_frequencies(written, 64, max_model_len)
        torch.testing.assert_close(frequencies, expected, rtol=1e-5, atol=1e-9)
        assert scale == pytest.approx(expected_scale)


def frequencies_of(max_model_len: int = 64, **config: Any) -> tuple[Tensor, float]:
    return rotary_frequencies({"max_position_embeddings": 64, "rope_theta": 100.0, **config}, 8, max_model_len)


def test_kinds_that_transformers_does_not_name() -> None:
    plain = frequencies_of()[0]
    exponents = torch.arange(4) / 4
    for kind in ("mrope", "default"):
        scaling = {"type": kind, "mrope_section": [2, 1, 1]}
        assert torch.equal(frequencies_of(rope_scaling=scaling)[0], plain)
    for kind in ("dynamic", "xdrope"):  # Hunyuan: the base is scaled by a given alpha
        got = frequencies_of(rope_scaling={"type": kind, "alpha": 50.0, "factor": 1.0})[0]
        torch.testing.assert_close(got, (100 * 50 ** (8 / 6)) ** -exponents)
    got = frequencies_of(rope_scaling={"type": "ntk", "factor": 4.0})[0]
    torch.testing.assert_close(got, 400**-exponents / 4**0.25)
    mixed = frequencies_of(rope_scaling={"type": "ntk", "factor": 4.0, "mixed_b": 0.5})[0]
    torch.testing.assert_close(mixed, plain / 4 ** ((torch.arange(4) + 1) / 4) ** 0.5)
    yarn = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.0}
    expected, scale = frequencies_of(rope_scaling={"type": "yarn", **yarn})
    assert scale < 1
    got, got_scale = frequencies_of(rope_scaling={"type": "deepseek_yarn", **yarn})
    assert torch.equal(got, expected)
    assert got_scale == scale
    short = {"short_factor": [2.0] * 4, "long_factor": [8.0] * 4}
    for length, factor in ((16, 2), (17, 8)):
        got, scale = frequencies_of(length, original_max_position_embeddings=16, rope_scaling={"type": "su", **short})
        torch.testing.assert_close(got, plain / factor)
        assert scale == pytest.approx(1.5**0.5)
    own = {"type": "longrope", **short, "short_mscale": 1.25, "long_mscale": 1.75}
    assert frequencies_of(16, original_max_position_embeddings=16, rope_scaling=own)[1] == 1.25
    assert frequencies_of(17, original_max_position_embeddings=16, rope_scaling=own)[1] == 1.75


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}, "original_max_position_embeddings": 8}, "list 4"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "how layers of None rotate"),
        ({"rope_scaling": {"type": "mllama4"}}, "'mllama4'; known are default"),
    ],
)
def test_rotations_that_cannot_be_computed_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        frequencies_of(**config)


def test_plain_rotary_frequencies() -> None:
    frequencies, scale = rotary_frequencies({"max_position_embeddings": 64, "rope_theta": 100.0}, 8, 64)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 100**-0.25, 0.1, 100**-0.75]))
    assert scale == 1.0
