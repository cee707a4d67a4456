"""What config.json leaves out: the table of defaults against the installed Transformers, and how it is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.core.config.model import ModelConfig
from quire.frontend.checkpoint.config_defaults import complete
from quire.frontend.checkpoint.model_spec import read_model_spec
from scripts import config_defaults

GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
"""The shape that the model was published with."""


def test_the_table_is_what_the_installed_classes_have() -> None:
    written = json.loads(config_defaults.PATH.read_bytes())
    table = json.loads(config_defaults.text_of(config_defaults.table()))
    if table["transformers"] == written["transformers"]:
        assert table == written, "run `python -m scripts.config_defaults`"
    for name in table["classes"].keys() & written["classes"].keys():  # another version has other classes and fields
        there, here = (each["classes"][name].get("fields", {}) for each in (table, written))
        assert {field: there[field] for field in there.keys() & here} == {
            field: here[field] for field in there.keys() & here
        }, name
    assert {"llama", "gemma3", "gemma3_text"} <= table["classes"].keys() & written["classes"].keys()


def test_gemma_3_as_it_was_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    spec = read_model_spec(tmp_path, ModelConfig(model="gemma-3-4b-it"))
    text = transformers.Gemma3Config.from_dict(GEMMA_3_4B).text_config
    assert (spec.vocab_size, spec.num_layers, spec.hidden_size) == (text.vocab_size, 34, 2560)
    assert (spec.num_attention_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.max_position_embeddings, spec.eos_token_ids, spec.dtype) == (131072, [1, 106], "bfloat16")
    for name in ("hidden_activation", "query_pre_attn_scalar", "rms_norm_eps", "sliding_window", "tie_word_embeddings"):
        assert spec.hf_config[name] == getattr(text, name), name


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ({"model_type": "llama"}, "rms_norm_eps", 1e-6),
        ({"model_type": "mixtral"}, "rms_norm_eps", 1e-5),
        ({"model_type": "mixtral", "num_key_value_heads": None}, "num_key_value_heads", None),
        ({"model_type": "mixtral", "num_experts": 3}, "num_local_experts", 3),  # another name that the class takes
        ({"architectures": ["MixtralForCausalLM"]}, "rope_theta", 1e6),
        ({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}, "routed_scaling_factor", 2.5),
        ({"model_type": "gpt_oss", "rope_theta": 5.0}, "rope_theta", 5.0),
        ({"model_type": "gpt_oss", "rope_scaling": {"rope_type": "linear"}}, "rope_parameters", None),
        ({"model_type": "llava", "text_config": {"model_type": "mixtral"}}, "rms_norm_eps", 1e-5),
        ({"model_type": "llava", "text_config": {}}, "rms_norm_eps", 1e-6),  # of llama
        ({"model_type": "smolvlm", "text_config": None}, "rms_norm_eps", 1e-5),  # its own for a llama
        ({"model_type": "smolvlm", "rms_norm_eps": 1e-4}, "rms_norm_eps", 1e-4),
        ({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, "hidden_activation", "gelu_pytorch_tanh"),
        ({"model_type": "gemma3", "text_config": {}}, "tie_word_embeddings", True),
        ({"model_type": "gemma3", "tie_word_embeddings": False, "text_config": {}}, "tie_word_embeddings", False),
        ({"model_type": "own", "text_config": {"model_type": "mixtral"}}, "num_local_experts", 8),
        ({"model_type": "own", "rms_norm_eps": 1e-3}, "rms_norm_eps", 1e-3),
    ],
)
def test_what_is_left_out_is_the_default_of_the_class(config: dict[str, Any], name: str, value: Any) -> None:
    assert complete(config)[name] == value
    assert set(config) <= {*complete(config), "text_config"}


def test_yarn_of_gpt_oss_is_a_default() -> None:
    assert complete({"model_type": "gpt_oss"})["rope_parameters"]["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("model_type", "inner"),
    [
        ("gemma3", "gemma3_text"),
        ("gemma3n", "gemma3n_text"),
        ("gemma4", "gemma4_text"),
        ("gemma4_unified", "gemma4_unified_text"),
        ("llama4", "llama4_text"),
        ("qwen3_5", "qwen3_5_text"),
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        ("qwen4_exp", "qwen4_exp_text"),
        ("mistral3", "ministral3"),
    ],
)
def test_inner_configs_have_the_defaults_of_their_own_class(model_type: str, inner: str) -> None:
    text = {"model_type": inner, "num_hidden_layers": 3, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    without = {"model_type", "tie_word_embeddings", "text_config"}
    whole, alone = complete({"model_type": model_type, "text_config": text}), complete(text)
    assert {k: v for k, v in whole.items() if k not in without} == {k: v for k, v in alone.items() if k not in without}
