"""The kind of a model, its tasks and its defaults, from the options and the checkpoint's files."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.config.engine_args import EngineArgs
from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.frontend.launch.options import resolve

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "intermediate_size": 8, "max_position_embeddings": 512,
}  # fmt: skip
POOLED = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]


def resolved(
    folder: Path,
    architecture: str,
    files: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[PoolingSpec | None, int]:
    """(how vectors are made, the longest prompt)."""
    files = {"config.json": CONFIG | {"architectures": [architecture]} | config, **(files or {})}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    args = EngineArgs.from_flat(model=str(folder), device="cpu", **(options or {}))
    found = resolve(args, read_model_spec(folder, args.model), "server")
    return found.pooling, found.max_model_len


@pytest.mark.parametrize(
    ("architecture", "tasks"),
    [
        ("LlamaForCausalLM", None),
        ("GPT2LMHeadModel", None),
        ("LlamaModel", ["embed", "token_embed"]),
        ("BertForMaskedLM", ["embed", "token_embed"]),
        ("LlamaForSequenceClassification", ["classify", "token_classify"]),
        ("LlamaForTokenClassification", ["token_classify"]),
        ("Qwen2ForRewardModel", ["token_classify"]),
        ("Qwen2ForProcessRewardModel", ["token_classify"]),
    ],
)
def test_the_class_says_what_a_model_makes(tmp_path: Path, architecture: str, tasks: list[str] | None) -> None:
    options = {"pooler_config": {"step_tag_id": 5}} if tasks == ["token_classify"] else None
    found, _ = resolved(tmp_path, architecture, options=options)
    assert (None if found is None else found.tasks) == tasks


@pytest.mark.parametrize(
    ("architecture", "config", "options", "fault"),
    [
        ("BertModel", {"model_type": "bert"}, {"runner": "generate"}, "is an encoder, which generates no text"),
        ("BertForMaskedLM", {"model_type": "bert"}, {"runner": "generate"}, "is an encoder, which generates no text"),
        ("LlamaForCausalLM", {"is_causal": False}, {"runner": "generate"}, "is an encoder, which generates no text"),
        ("LlamaForCausalLM", {"is_causal": False}, {"convert": "none"}, "choose --convert embed or classify"),
        ("LlamaForCausalLM", {}, {"runner": "pooling", "convert": "none"}, "choose --convert embed or classify"),
    ],
)
def test_a_model_without_an_output_is_refused(
    tmp_path: Path, architecture: str, config: dict[str, Any], options: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        resolved(tmp_path, architecture, options=options, **config)


def test_weights_of_the_vocabulary_are_sparse_vectors(tmp_path: Path) -> None:
    sparse = {"pooler_config": {"seq_pooling_type": "SPLADE_MAX"}}
    found, _ = resolved(tmp_path, "BertForMaskedLM", options=sparse, model_type="bert")
    assert found is not None
    assert found.describe().startswith("serves embed, token_embed; pooling SPLADE_MAX; sparse vectors of 64 (")
    with pytest.raises(ConfigError, match="scores no vocabulary at each token"):
        resolved(tmp_path, "BertModel", options=sparse, model_type="bert")
    with pytest.raises(ConfigError, match="use --convert embed"):
        resolved(tmp_path, "BertForSequenceClassification", options=sparse, model_type="bert")
    sparse["pooler_config"]["enable_chunked_processing"] = True  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="makes means"):
        resolved(tmp_path, "BertForMaskedLM", options=sparse, model_type="bert")


def test_an_encoder_with_the_class_of_a_decoder_makes_vectors(tmp_path: Path) -> None:
    found, _ = resolved(tmp_path, "LlamaForCausalLM", is_causal=False)
    assert found is not None
    assert found.tasks == ["embed", "token_embed"]
    assert found.describe().startswith("serves embed, token_embed; pooling CLS; vectors of 8")


def test_a_decoder_without_files_takes_the_last_token(tmp_path: Path) -> None:
    found, _ = resolved(tmp_path, "LlamaModel")
    assert found is not None
    assert found.sequence == "LAST"
    assert found.describe().startswith("serves embed, token_embed; pooling LAST; vectors of 8")


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({"runner": "pooling"}, ["embed", "token_embed"]),
        ({"convert": "embed"}, ["embed", "token_embed"]),
        ({"convert": "classify"}, ["classify", "token_classify"]),
        ({"runner": "pooling", "pooler_config": {"task": "token_embed"}}, ["token_embed", "embed"]),
        ({"runner": "generate"}, None),
    ],
)
def test_options_say_it_instead(tmp_path: Path, options: dict[str, Any], tasks: list[str] | None) -> None:
    found, _ = resolved(tmp_path, "LlamaForCausalLM", options=options)
    assert (None if found is None else found.tasks) == tasks


def test_files_of_sentence_transformers_say_it(tmp_path: Path) -> None:
    files = {
        "modules.json": POOLED,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": 128, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"query": "Q: "}, "similarity_fn_name": "dot"},
    }
    found, longest = resolved(tmp_path, "LlamaForCausalLM", files)
    assert found is not None
    assert (found.tasks[0], found.sequence, found.use_activation, longest) == ("embed", "MEAN", False, 128)
    assert (found.prompts, found.similarity, found.do_lower_case) == ({"query": "Q: "}, "dot", True)
    assert found.describe() == (
        "serves embed, token_embed; pooling MEAN; vectors of 8; prompts for query "
        "(runner from modules.json, pooling from modules.json)"
    )
    chosen = {"pooler_config": {"seq_pooling_type": "CLS", "use_activation": True}, "max_model_len": 256}
    found, longest = resolved(tmp_path, "LlamaForCausalLM", files, chosen)
    assert found is not None
    assert (found.sequence, found.use_activation, longest) == ("CLS", True, 256)
    found, longest = resolved(tmp_path, "LlamaForCausalLM", files, {"runner": "generate"})
    assert (found, longest) == (None, 512)


@pytest.mark.parametrize(
    ("config", "activation", "classes"),
    [
        ({}, "auto", ["LABEL_0", "LABEL_1"]),
        ({"num_labels": 1}, "auto", ["LABEL_0"]),
        ({"id2label": {"1": "b", "0": "a", "10": "c"}}, "auto", ["a", "b", "c"]),
        ({"problem_type": "regression"}, "torch.nn.modules.linear.Identity", ["LABEL_0", "LABEL_1"]),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            "torch.nn.modules.activation.Sigmoid",
            ["LABEL_0", "LABEL_1"],
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            "torch.nn.modules.linear.Identity",
            ["LABEL_0", "LABEL_1"],
        ),
    ],
)
def test_classes_and_their_activation(
    tmp_path: Path, config: dict[str, Any], activation: str, classes: list[str]
) -> None:
    found, _ = resolved(tmp_path, "LlamaForSequenceClassification", **config)
    assert found is not None
    assert (found.score_activation, found.classes) == (activation, classes)


def test_tokens_that_are_the_classes(tmp_path: Path) -> None:
    tokenizer = {"tokenizer.json": {"added_tokens": [], "model": {"vocab": {"no": 3, "yes": 4}}}}
    tokens = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    found, _ = resolved(tmp_path, "LlamaForSequenceClassification", tokenizer, **tokens)
    assert found is not None
    assert found.token_scores is not None
    assert (found.token_scores.token_ids, found.token_scores.as_difference) == ([3, 4], True)
    assert found.classes == ["LABEL_0"]
    assert found.joins_texts


@pytest.mark.parametrize(
    ("config", "joins"),
    [
        ({}, False),
        ({"use_sep_token": False}, True),
        ({"classifier_from_token": ["no", "yes"]}, False),
        ({"classifier_from_token": ["no", "yes"], "method": "no_post_processing"}, True),
        ({"classifier_from_token": ["no", "yes"], "method": "no_post_processing", "use_sep_token": True}, False),
    ],
)
def test_how_a_pair_is_written(tmp_path: Path, config: dict[str, Any], joins: bool) -> None:
    """As in vLLM: a decoder reads one text only where its tokens are made classes by a `method`."""
    tokenizer = {"tokenizer.json": {"added_tokens": [], "model": {"vocab": {"no": 3, "yes": 4}}}}
    found, _ = resolved(tmp_path, "LlamaForSequenceClassification", tokenizer, **config)
    assert found is not None
    assert found.joins_texts == joins


def test_prompts_of_config_json_come_before_those_of_sentence_transformers(tmp_path: Path) -> None:
    files = {
        "modules.json": POOLED,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "config_sentence_transformers.json": {"prompts": {"query": "Q: "}},
    }
    found, _ = resolved(tmp_path, "LlamaModel", files, task_instructions={"retrieval.query": "Find: ", "other": 5})
    assert found is not None
    assert found.prompts == {"retrieval.query": "Find: "}


def test_a_plugin_of_the_options_or_of_config_json(tmp_path: Path) -> None:
    for options, config in (({"io_processor_plugin": "mine"}, {}), ({}, {"io_processor_plugin": "mine"})):
        found, _ = resolved(tmp_path, "LlamaModel", options=options, **config)
        assert found is not None
        assert found.io_processor_plugin == "mine"
        assert "plugin mine" in found.describe()
