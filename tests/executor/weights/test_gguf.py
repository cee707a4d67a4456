"""GGUF files: blocks of each type as numbers, and models of them against checkpoints that hold the same numbers."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config

from quire.core.errors import ModelLoadError
from quire.executor.layers.linear import ColumnLinear, whole
from quire.executor.layers.vocabulary import VocabularyWeight
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.quantization.formats.gguf_blocks import FORMATS, unpack, with_short_scales
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.frontend.checkpoint.gguf import make_folder, parts_of
from quire.ops.quantized import QuantizedWeight, dequantize
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, model_context, read_spec
from tests.executor.thread_group import on_every_rank
from tests.gguf_files import gguf, make_gguf, random_blocks

TOKENS = [5, 9, 200, 17, 33, 4, 250, 61]
Served = Callable[..., tuple[Path, Path]]


@pytest.fixture
def served(checkpoint: Checkpoints, tmp_path: Path, gguf_cache: Path) -> Served:
    """Makes a GGUF file; returns the folder that stands for it, and that of the checkpoint with the same numbers."""

    def make(family: str, architecture: str, kind: str | dict[str, str] = "Q8_0", **options: Any) -> tuple[Path, Path]:
        own = ("metadata", "embedding", "without", "is_fused")
        written = {name: options.pop(name) for name in own if name in options}
        source = checkpoint(family, **options)
        same = make_gguf(source, tmp_path / "model.gguf", architecture, kind, **written)
        return make_folder(parts_of(tmp_path / "model.gguf")), same

    return make


def logits(folder: Path, **options: Any) -> torch.Tensor:
    driver = PagedDriver(load_model(read_spec(folder), **options), 1, 32)
    return driver.step({0: TOKENS})[0]


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_are_the_numbers_that_the_makers_package_reads(kind: str) -> None:
    raw = random_blocks((6, 512), kind, 0.1)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    weight = unpack(torch.from_numpy(raw), FORMATS[kind], 512)
    assert np.array_equal(dequantize(weight).numpy(), expected)
    layout = FORMATS[kind].layout
    assert (weight.group_size, weight.scales.dtype) == (layout.group_size, layout.scales)
    empty = unpack(torch.from_numpy(raw).to("meta"), FORMATS[kind], 512)
    assert (weight.has_byte_inputs, empty.has_byte_inputs) == (True, True)
    assert [(part.shape, part.dtype) if isinstance(part, torch.Tensor) else part for part in empty] == [
        (part.shape, part.dtype) if isinstance(part, torch.Tensor) else part for part in weight
    ]


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_short_scales_are_as_exact_as_those_of_the_makers(kind: str) -> None:
    """Of numbers as small as weights are, where float16 has few digits for the scales of Q6_K, as its makers had."""
    raw = torch.from_numpy(random_blocks((6, 512), kind, 0.01))
    weight = unpack(raw, FORMATS[kind], 512)
    short = with_short_scales(weight, "layer")
    assert short.scales.dtype == torch.float16
    assert 2 * short.scales.nbytes == weight.scales.nbytes
    torch.testing.assert_close(short.scales.float(), weight.scales, rtol=2**-11, atol=2**-25)
    assert (short.offsets is None) == (weight.offsets is None)
    if short.offsets is not None and weight.offsets is not None:
        assert short.offsets.dtype == torch.float16
        torch.testing.assert_close(short.offsets.float(), weight.offsets, rtol=2**-11, atol=2**-25)
    exact = unpack(torch.from_numpy(random_blocks((6, 512), "Q8_0", 0.01)), FORMATS["Q8_0"], 512)
    assert with_short_scales(exact, "layer") is exact
    with pytest.raises(ModelLoadError, match=r"layer: scales .* beyond float16's .* --dtype float32"):
        with_short_scales(weight._replace(scales=weight.scales + 65536), "layer")


TABLES = {"attn": "Q4_0", "ffn_gate": "Q4_1", "ffn_up": "IQ4_NL", "ffn_down": "Q2_K"}
MIXED = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "ffn_gate": "Q5_0", "ffn_up": "Q4_0", "ffn_down": "Q3_K"}


@pytest.mark.parametrize("kind", [*FORMATS, "F16", "BF16", "IQ2_XS", "TQ2_0", MIXED, TABLES], ids=str)
def test_a_model_of_each_type_is_that_of_its_numbers(kind: str | dict[str, str], served: Served) -> None:
    folder, same = served("llama", "llama", kind, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    assert torch.allclose(logits(folder), logits(same), atol=1e-4, rtol=1e-4)


def test_the_name_of_another_format_is_refused(served: Served, checkpoint: Checkpoints) -> None:
    folder, same = served("qwen3", "qwen3")
    with pytest.raises(ModelLoadError, match=r"is quantized as its GGUF file is: drop --quantization int8\."):
        load_model(read_spec(folder), quantization="int8")
    with pytest.raises(
        ModelLoadError, match=r"is not quantized, and --quantization gguf names a format of checkpoints"
    ):
        load_model(read_spec(same), quantization="gguf")


def test_queries_keys_and_values_of_differing_types_keep_theirs(served: Served) -> None:
    """Of one product for queries and keys, and one for values: outputs are those of three, also from a recording."""
    folder, same = served("llama", "llama", MIXED, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    expected = logits(same)
    for got in on_every_rank(2, lambda group: logits(folder, group=group)):
        assert torch.allclose(got, expected, atol=1e-4, rtol=1e-4)
    context = model_context(read_spec(folder))
    sizes = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    parts = [whole(f"model.layers.0.self_attn.{name}", size) for name, size in sizes.items()]
    with contextlib.closing(context.weights):
        fused = ColumnLinear(context, parts, 256)
        separate = [ColumnLinear(context, [part], 256) for part in parts]
    assert held_bytes(fused) == pytest.approx(held_bytes(separate), abs=1024), "but for tables of sixteen values"
    x = torch.randn(3, 256)
    out, recording = context.ops.record(lambda: fused(x))
    assert torch.equal(out, torch.cat([layer(x) for layer in separate], dim=1))
    if recording is not None:  # plain torch has none
        x.neg_()
        recording.run()
        assert torch.equal(out, torch.cat([layer(x) for layer in separate], dim=1))


_STRETCHED = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                       "original_max_position_embeddings": 64},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "mixtral": ("llama", {}, {}),
    "qwen2_moe": ("qwen2moe", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}, {}),
    "qwen3_moe": ("qwen3moe", {"moe_intermediate_size": 32, "norm_topk_prob": True}, {}),
    "olmoe": ("olmoe", {"intermediate_size": 64}, {}),
    "gemma": ("gemma", {"tie": True}, {}),
    "gemma2": ("gemma2", {"tie": True, "query_pre_attn_scalar": 16}, {"attention.sliding_window": 4}),
    "gemma3": ("gemma3", {"tie": True, "query_pre_attn_scalar": 16}, {"attention.sliding_window": 4}),
    "phi3": ("phi3", {}, {}),
    "starcoder2": ("starcoder2", {"tie": True}, {"attention.layer_norm_epsilon": 1e-5}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.25, "logits_scaling": 2.0},
        {"embedding_scale": 3.0, "attention.scale": 0.5, "residual_scale": 0.25, "logit_scale": 2.0},
    ),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": (
        "olmo2",
        {"layer_types": ["sliding_attention", "full_attention"], "rope": _STRETCHED},
        {
            "attention.sliding_window": 4,
            "attention.sliding_window_pattern": [True, False],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "cohere": ("command-r", {"tie": True}, {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.0625}),
    "cohere2": (
        "cohere2",
        {"tie": True},
        {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.0625, "attention.sliding_window": 4},
    ),
    "glm4": ("glm4", {}, {"rope.dimension_count": 8}),
    "granite_moe": (
        "granitemoe",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.25, "logits_scaling": 2.0},
        {"embedding_scale": 3.0, "attention.scale": 0.5, "residual_scale": 0.25, "logit_scale": 2.0},
    ),
    "gpt_oss": (
        "gpt-oss",
        {
            "rope": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "attention.sliding_window": 4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5-moe",
        {"moe_intermediate_size": 32, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
        {"expert_shared_count": 2, "leading_dense_block_count": 1},
    ),
    "minimax_m2": ("minimax-m2", {"rotary_dim": 8}, {"rope.dimension_count": 8}),
    "phimoe": ("phimoe", {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.01}, {}),
    "glm4_moe": (
        "glm4moe",
        {
            "moe_intermediate_size": 32,
            "use_qk_norm": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
        },
        {
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 1.5,
            "rope.dimension_count": 8,
        },
    ),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_architecture_is_the_model_that_the_file_was_made_of(family: str, served: Served) -> None:
    architecture, options, metadata = FAMILIES[family]
    window = {"sliding_window": 4} if "attention.sliding_window" in metadata else {}
    folder, same = served(family, architecture, metadata=metadata, **options, **window)
    assert torch.allclose(logits(folder), logits(same), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "architecture", "kind"),
    [("llama", "llama", "Q8_0"), ("qwen2", "qwen2", "F32"), ("qwen3", "qwen3", "Q8_0"), ("gemma", "gemma", "Q8_0")],
)
def test_queries_keys_and_values_may_be_one_tensor(family: str, architecture: str, kind: str, served: Served) -> None:
    """Of any architecture, as llama.cpp reads them; Qwen 2 has biases in it, too."""
    folder, same = served(family, architecture, kind, is_fused=True, tie=family == "gemma")
    assert torch.allclose(logits(folder), logits(same), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("without", "is_fused"),
    [
        (r"attn_output\.bias", False),
        (r"attn_output\.bias", True),
        (r"attn_[qk]\.bias|attn_output\.bias", False),
        (r"attn_[qkv]\.bias", True),
        (r"blk\.0.*attn_.*bias", False),
        (r"ffn_(gate|up)\.bias|attn_v\.bias", False),
    ],
)
def test_biases_that_a_file_leaves_out_are_zero(without: str, is_fused: bool, served: Served) -> None:
    options: dict[str, Any] = {"without": without, "is_fused": is_fused}
    folder, same = served("llama", "llama", attention_bias=True, mlp_bias=True, **options)
    assert torch.allclose(logits(folder), logits(same), atol=1e-4, rtol=1e-4)


def test_lfm2_whose_layers_are_of_two_kinds(checkpoint: Checkpoints, tmp_path: Path, gguf_cache: Path) -> None:
    config = Lfm2Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, full_attn_idxs=[1], block_auto_adjust_ff_dim=False, architectures=["Lfm2ForCausalLM"],
    )  # fmt: skip
    source = tmp_path / "source"
    shutil.copytree(checkpoint("llama"), source)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(source)
    own = {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "attention.layer_norm_rms_epsilon": 1e-5}
    same = make_gguf(source, tmp_path / "model.gguf", "lfm2", "Q8_0", metadata=own)
    folder = make_folder(parts_of(tmp_path / "model.gguf"))
    assert torch.allclose(logits(folder), logits(same), atol=1e-4, rtol=1e-4)


def test_experts_of_gpt_oss_stay_in_four_bits(served: Served) -> None:
    """As its files have them, on one rank and on two, of which one adds the biases."""
    kinds = {"_exps": "MXFP4", "attn": "Q8_0"}
    architecture, options, metadata = FAMILIES["gpt_oss"]
    sizes = {"sliding_window": 4, "intermediate_size": 64}
    folder, same = served("gpt_oss", architecture, kinds, metadata=metadata, **options, **sizes)
    expected = logits(same)
    context = model_context(read_spec(folder))
    with contextlib.closing(context.weights):
        part = LinearPart("model.layers.0.mlp.experts.1.up_proj", 64, Shard(0, 0, 64))
        weight = context.scheme.read_weight(context, part, 64)
    assert isinstance(weight, QuantizedWeight)
    assert weight.codes.shape == (64, 32)
    for got in (logits(folder), *on_every_rank(2, lambda group: logits(folder, group=group))):
        assert torch.allclose(got, expected, atol=1e-4, rtol=1e-4)


EXPERTS = {
    "downs": {"gate_exps": "Q4_K", "up_exps": "Q4_K", "down_exps": "Q6_K"},
    "all": {"gate_exps": "IQ4_XS", "up_exps": "Q5_K", "down_exps": "Q2_K"},
    "plain ups": {"gate_exps": "Q3_K", "up_exps": "F16", "down_exps": "Q8_0"},
}


@pytest.mark.parametrize("kinds", EXPERTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "granite_moe"])
def test_experts_whose_layers_differ_keep_their_types(family: str, kinds: str, served: Served) -> None:
    """On one rank and on two, one of which cuts blocks of `down`; with `Q4_K_M`, downs have more bits than the rest."""
    architecture, options, metadata = FAMILIES[family]
    sizes = {
        "hidden_size": 256,
        "moe_intermediate_size" if "moe_intermediate_size" in options else "intermediate_size": 256,
    }
    folder, same = served(family, architecture, EXPERTS[kinds], metadata=metadata, **(options | sizes))
    expected = logits(same)
    for got in (logits(folder), *on_every_rank(2, lambda group: logits(folder, group=group))):
        assert torch.allclose(got, expected, atol=1e-4, rtol=1e-4)
    spec, plain = read_spec(folder), held_bytes(load_model(read_spec(same)))
    held = held_bytes(load_model(spec))
    assert held < plain * 0.6, "experts are most of the model, and those of few bits stay so"
    context = model_context(spec)
    with contextlib.closing(context.weights), torch.inference_mode():
        assert held_bytes(dry_build(spec, context)) == pytest.approx(held, abs=1024)


@pytest.mark.parametrize("tie", [False, True])
def test_embeddings_and_heads_keep_their_codes(tie: bool, served: Served) -> None:
    """Of a byte, with a scale for 16; a rank's rows are those of the widened weight."""
    folder, same = served("llama", "llama", "Q4_K", hidden_size=256, intermediate_size=256, embedding="Q6_K", tie=tie)
    assert torch.allclose(logits(folder), logits(same), atol=1e-4, rtol=1e-4)
    ranks = []
    for rank in range(2):
        context = model_context(read_spec(folder), group=ParallelGroup(rank, 2))
        with contextlib.closing(context.weights):
            rows = VocabularyWeight(context, "model.embed_tokens.weight", 320, 256, is_shared=tie).rows
        assert held_bytes(rows) == pytest.approx(160 * 256 * (1 + 4 / 16), rel=0.01)
        ranks.append(rows.take(torch.arange(160), 1.0))
    with contextlib.closing(model_context(read_spec(same)).weights) as weights:
        assert torch.equal(torch.cat(ranks), weights.read("model.embed_tokens.weight", (320, 256)))


def test_a_shard_that_cuts_a_block_is_cut_after_unpacking(served: Served) -> None:
    """Of 96 inputs, each of two ranks has 48: one and a half blocks of 32, in groups of 16."""
    folder, same = served("llama", "llama", "Q5_1", intermediate_size=96)
    for rank in range(2):
        parts = []
        for path in (folder, same):
            context = model_context(read_spec(path), group=ParallelGroup(rank, 2))
            part = LinearPart("model.layers.0.mlp.down_proj", 64, Shard(1, 48 * rank, 48 * rank + 48))
            with contextlib.closing(context.weights):
                parts.append(context.scheme.read_weight(context, part, 96))
        assert isinstance(parts[0], QuantizedWeight)
        assert parts[0].group_size == 16
        assert torch.equal(dequantize(parts[0]), parts[1])


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 6), ("bfloat16", 5), ("float16", 5)])
def test_scales_are_short_beside_short_activations(dtype: str, bits: int, served: Served) -> None:
    """As they are read, packed, and cut into ranks' parts inside a block."""
    folder, _ = served("llama", "llama", "Q4_K", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    spec = read_spec(folder, dtype=dtype)
    for rank in range(2):
        context = model_context(spec, group=ParallelGroup(rank, 2))
        part = LinearPart("model.layers.0.mlp.down_proj", 256, Shard(1, 128 * rank, 128 * rank + 128))
        with contextlib.closing(context.weights):
            weight = context.scheme.read_weight(context, part, 256)
        assert isinstance(weight, QuantizedWeight)
        assert held_bytes(context.ops.pack_linear(weight)) == pytest.approx(256 * 128 * bits / 8, abs=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q4_K", MIXED, TABLES], ids=str)
def test_bytes_are_counted_before_anything_is_read(kind: str | dict[str, str], dtype: str, served: Served) -> None:
    folder, _ = served("llama", "llama", kind, hidden_size=256, intermediate_size=256)
    spec = read_spec(folder, dtype=dtype)
    model, context = load_model(spec), model_context(spec)
    with contextlib.closing(context.weights), torch.inference_mode():
        # Tables of sixteen values, which take less if they are numbers in a row, are known only once they are read.
        assert held_bytes(dry_build(spec, context)) == pytest.approx(held_bytes(model), abs=1024)
